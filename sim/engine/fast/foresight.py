"""Looking ahead over rows that hold nothing but the cohort's decodes."""

from __future__ import annotations

from functools import partial

from sim.cost.interface import CostModel, DecodeEnds, decode_ends
from sim.engine.fast.scheduler import FastScheduler
from sim.engine.fast.timeline import Stretch, Timeline

LEAST_AHEAD = 8
MOST_AHEAD = 4096
"""Rows foreseen at a time; in between it follows how many come true."""


class Foresight:
    """Appends foreseen rows to the timeline, and has the scheduler take them up when their time
    has come. Nobody but the timeline knows of them before.

    Foreseen are rows with the whole cohort up to the next last token. With steps planned ahead one
    more row follows before anybody can react to that token: the row *owed*, without those who are
    done, though they still hold their slots and blocks. It is worked out when its time has come.
    """

    def __init__(self, scheduler: FastScheduler, timeline: Timeline, cost: CostModel) -> None:
        self._scheduler = scheduler
        self._timeline = timeline
        own = getattr(cost, "decode_ends", None)
        self._decode_ends: DecodeEnds = own if own is not None else partial(decode_ends, cost)
        self._most = LEAST_AHEAD
        self._count = 0
        """Foreseen rows not taken up."""
        self._owes = False
        self._owed_waiting = 0
        """Requests that wait when the owed row is planned."""
        self._since = -1
        """The row that was committed last when they were foreseen."""

    def look_ahead(self, now: int) -> int | None:
        """Append the rows to come, planned at `now` and later. When the next event is due then;
        None if no row can be foreseen."""
        scheduler, timeline = self._scheduler, self._timeline
        cohort, ends, depth = scheduler.cohort, timeline.ends, timeline.depth
        row = cohort.row
        last_token_row = cohort.first_last_row()
        if last_token_row is None or cohort.size > scheduler.rules.budget:
            return None
        most = full = last_token_row - row + 1
        if most > self._most:
            most = self._most
        before = len(ends)
        leaving = scheduler.leaving
        if leaving:  # somebody is about to free a slot and blocks
            freed = leaving[0].last_row - timeline.first + depth - before
            if most > freed:
                most = freed
        used = cohort.usage(most, scheduler.blocks)
        count = len(used)
        if not count:
            return None
        start_ns = ends[-1] if ends else timeline.last_end_ns
        if start_ns < now:
            start_ns = now
        stretch = Stretch(
            count,
            start_ns,
            len(scheduler.running),
            scheduler.num_waiting,
            cohort.size,
            cohort.context,
            cohort.context_sq,
            cohort.size,
        )
        ends += self._decode_ends(start_ns, cohort.size, cohort.context, cohort.context_sq, count)
        timeline.used += used
        timeline.stretches.append(stretch)
        self._count = count
        self._owes = False
        self._since = timeline.first - 1
        if count == full:
            if depth == 2 and not leaving:
                blocks = scheduler.blocks
                self._owes = used[-1] + cohort.demand(row + count) <= blocks.num_blocks
                self._owed_waiting = scheduler.num_waiting
                if self._owes:
                    return ends[-1]
        elif count == self._most:
            self._most = min(2 * count, MOST_AHEAD)
        spare = len(ends) - depth
        return ends[spare] if spare > 0 else ends[0]

    def queue_one_more(self, now: int) -> None:
        """One more request waits; rows planned at `now` or later show it."""
        if self._timeline.queue_one_more(now) and self._owes:
            self._owed_waiting += 1

    def cut(self, planned: int) -> None:
        """The rows after the first `planned` of the timeline will not be as foreseen."""
        surplus = len(self._timeline.ends) - planned
        if surplus >= 0:
            self._owes = False
        if surplus > 0:
            self._timeline.keep(planned)
            self._count -= surplus
            if self._count + 1 < self._most:
                self._most = max(LEAST_AHEAD, 2 * self._count)

    def take_up(self, planned: int) -> None:
        """The first `planned` rows of the timeline have come true."""
        timeline, scheduler = self._timeline, self._scheduler
        rows = len(timeline.ends)
        count = (planned if planned < rows else rows) - timeline.planned
        if count > 0:
            self._count -= count
            scheduler.take_up(count, self._since, timeline.depth)
            timeline.planned += count
            blocks = scheduler.blocks
            taken = timeline.used[timeline.planned - 1] - (blocks.num_blocks - blocks.free)
            if taken:
                blocks.take(taken)
        if self._owes and planned > rows:
            self._owes = False
            self._pay()

    def _pay(self) -> None:
        """Plan the row owed; nobody may be left for it."""
        scheduler, timeline = self._scheduler, self._timeline
        cohort, blocks = scheduler.cohort, scheduler.blocks
        size = cohort.size
        if not size:
            return
        need = cohort.demand(cohort.row)
        if need:
            blocks.take(need)
        start_ns, context, context_sq = timeline.ends[-1], cohort.context, cohort.context_sq
        stretch = Stretch(
            1,
            start_ns,
            len(scheduler.running),
            self._owed_waiting,
            size,
            context,
            context_sq,
            size - len(scheduler.overrunning),
        )
        (end_ns,) = self._decode_ends(start_ns, size, context, context_sq, 1)
        timeline.add(stretch, end_ns, blocks.num_blocks - blocks.free)
        scheduler.take_up(1, self._since, timeline.depth)
