"""Steps that have not ended: those planned, and decode-only ones foreseen after them.

With `depth` steps in flight, row `i` is planned when row `i - depth` ends. As long as nothing
arrives or leaves, the rows to come are foreseen: their ends are known, but nobody has acted on
them, and `cut` takes back those that would be planned at or after a given time.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

from sim.engine.fast.sequence import FastSequence
from sim.engine.log import StepLog


class Stretch:
    """Consecutive decode-only rows of one batch, as columns of the step log (see there)."""

    __slots__ = (
        "context",
        "context_sq",
        "count",
        "num_decodes",
        "num_gaps",
        "num_running",
        "num_waiting",
        "start_ns",
    )

    plain = True

    def __init__(
        self,
        count: int,
        start_ns: int,
        num_running: int,
        num_waiting: int,
        num_decodes: int,
        context: int,
        context_sq: int,
        num_gaps: int,
    ) -> None:
        """`count` rows; contexts and gaps are the first row's, in every later one all decodes
        have a gap. A negative `start_ns` stands for the end of the row before."""
        self.count = count
        self.start_ns = start_ns
        self.num_running = num_running
        self.num_waiting = num_waiting
        self.num_decodes = num_decodes
        self.context = context
        self.context_sq = context_sq
        self.num_gaps = num_gaps

    def split(self, count: int) -> Stretch:
        """Keep the first `count` rows; the rest becomes a new stretch."""
        context = self.context + count * self.num_decodes
        rest = Stretch(
            self.count - count,
            -1,
            self.num_running,
            self.num_waiting,
            self.num_decodes,
            context,
            self.context_sq + count * (self.context + context),
            self.num_decodes,
        )
        self.count = count
        return rest


class Row(Stretch):
    """One row that is more than decodes."""

    __slots__ = (
        "admitted",
        "cached_tokens",
        "completing",
        "late",
        "num_preempted",
        "num_sampled",
        "prefills",
    )

    plain = False

    def __init__(self) -> None:
        """An empty row, to be filled in by the scheduler."""
        self.count = 1
        self.num_decodes = self.context = self.context_sq = self.num_gaps = 0
        self.prefills: list[tuple[int, int]] = []
        self.admitted: list[FastSequence] = []
        """Sequences scheduled for the first time."""
        self.completing: list[FastSequence] = []
        """Sequences whose last prefill chunk is in this row, so they sample."""
        self.late: list[tuple[FastSequence, int]] = []
        """(sequence whose token here ends a gap over more than one row, row it began in)."""
        self.cached_tokens = 0
        self.num_preempted = 0
        self.num_sampled = 0


class Timeline:
    """The rows after those in the log.

    Invariants: `ends` increases; `used` is as long as `ends`, and the counts of `stretches` sum
    to that; the first `planned` rows are planned; without a cut `len(ends) >= planned`.
    """

    __slots__ = ("depth", "ends", "first", "last_end_ns", "log", "planned", "stretches", "used")

    def __init__(self, log: StepLog, depth: int) -> None:
        self.log = log
        self.depth = depth
        self.ends: list[int] = []
        """End of every row, ns."""
        self.used: list[int] = []
        """Blocks held after every row was planned."""
        self.stretches: list[Stretch] = []
        self.planned = 0
        self.first = 0
        """Row of the first of them: as many are in the log."""
        self.last_end_ns = 0
        """End of the last row in the log."""

    def add(self, stretch: Stretch, end_ns: int, used_blocks: int) -> None:
        """A row has been planned."""
        self.stretches.append(stretch)
        self.ends.append(end_ns)
        self.used.append(used_blocks)
        self.planned += 1

    def keep(self, count: int) -> None:
        """Take back the foreseen rows after the first `count`; there are some."""
        surplus = len(self.ends) - count
        del self.ends[count:]
        del self.used[count:]
        stretches = self.stretches
        while surplus:
            last = stretches[-1]
            if last.count > surplus:
                last.count -= surplus
                break
            surplus -= last.count
            stretches.pop()

    def queue_one_more(self, now: int) -> bool:
        """One more request waits; foreseen rows planned at `now` or later show it. Whether the
        row after them does, too."""
        index = bisect_left(self.ends, now) + self.depth
        stretches = self.stretches
        at = place = 0
        while place < len(stretches):
            stretch = stretches[place]
            if at < index < at + stretch.count:
                stretches.insert(place + 1, stretch.split(index - at))
            elif at >= index:
                stretch.num_waiting += 1
            at += stretch.count
            place += 1
        return index <= at

    def lose_token(self, seq: FastSequence) -> None:
        """`seq` is aborted: its tokens in rows that have not ended will not be delivered."""
        row = self.first
        place = 0
        while place < len(self.stretches):
            stretch = self.stretches[place]
            if stretch.count > 1:
                self.stretches.insert(place + 1, stretch.split(1))
            if seq.has_token(row) and seq.has_token(row - 1):
                stretch.num_gaps -= 1
            elif isinstance(stretch, Row):
                stretch.late = [entry for entry in stretch.late if entry[0] is not seq]
            row += 1
            place += 1

    def commit(self, count: int) -> None:
        """The first `count` rows have ended: they go to the log."""
        ends, stretches, log = self.ends, self.stretches, self.log
        start_ns = self.last_end_ns
        at = whole = 0
        while at < count:
            s = stretches[whole]
            if s.count > count - at:
                stretches.insert(whole + 1, s.split(count - at))
            if s.start_ns >= 0:
                start_ns = s.start_ns
            if not s.plain:
                self._add_details(s, at)
            log.add_entry(
                s.count,
                start_ns,
                s.num_running,
                s.num_waiting,
                s.num_decodes,
                s.context,
                s.context_sq,
                s.num_gaps,
            )
            at += s.count
            start_ns = ends[at - 1]
            whole += 1
        log.add_ends(ends[:count], self.used[:count])
        self.last_end_ns = start_ns
        self.planned -= count
        self.first += count
        del ends[:count]
        del self.used[:count]
        del stretches[:whole]

    def _add_details(self, stretch: Stretch, at: int) -> None:
        assert isinstance(stretch, Row)
        log = self.log
        for _, began in stretch.late:
            ago = began - self.first
            began_ns = self.ends[ago] if ago >= 0 else log.end_ns(began)
            log.add_long_gap(self.first + at, self.ends[at] - began_ns)
        log.add_details(
            self.first + at,
            stretch.prefills,
            stretch.num_decodes,
            stretch.num_decodes,
            stretch.num_sampled,
            stretch.cached_tokens,
            stretch.num_preempted,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert self.first == len(self.log), "rows in the log"
        rows = len(self.ends)
        assert len(self.used) == rows == sum(s.count for s in self.stretches), "rows lost"
        assert all(s.count > 0 for s in self.stretches), "an empty stretch"
        assert 0 <= self.planned <= min(rows, self.depth), "planned rows"
        ends = [self.last_end_ns, *self.ends]
        assert all(a < b for a, b in pairwise(ends)), "steps overlap"
