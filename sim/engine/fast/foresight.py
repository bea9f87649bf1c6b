"""Looking ahead over rows that hold nothing but the cohort's decodes."""

from __future__ import annotations

from functools import partial

from sim.cost.interface import CostModel, DecodeEnds, StepShape, decode_ends
from sim.engine.fast.scheduler import FastScheduler
from sim.engine.fast.timeline import Stretch, Timeline

LEAST_AHEAD = 8
MOST_AHEAD = 4096
"""Rows foreseen at a time; in between it follows how many come true."""


class Foresight:
    """Appends foreseen rows to the timeline, and has the scheduler take them up when their time
    has come. Nobody but the timeline knows of them before.

    Foreseen are rows with the whole cohort up to the next last token; with steps planned ahead
    also the row after it, the *tail*, which goes without those who are done (they still hold
    their slots and blocks then).
    """

    def __init__(self, scheduler: FastScheduler, timeline: Timeline, cost: CostModel) -> None:
        self._scheduler = scheduler
        self._timeline = timeline
        self._cost = cost
        own = getattr(cost, "decode_ends", None)
        self._decode_ends: DecodeEnds = own if own is not None else partial(decode_ends, cost)
        self._shape = StepShape(0, 0, 0, (), 0)
        self._most = LEAST_AHEAD
        self._count = 0
        """Foreseen rows not taken up, the tail included."""
        self._has_tail = False
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
        self._append(stretch)
        timeline.used += used
        timeline.stretches.append(stretch)
        self._count = count
        self._has_tail = False
        self._since = timeline.first - 1
        if count == full:
            if depth == 2 and not leaving and not self._append_tail(stretch):
                return ends[-1]  # all are done then
        elif count == self._most:
            self._most = min(2 * count, MOST_AHEAD)
        spare = len(ends) - depth
        return ends[spare] if spare > 0 else ends[0]

    def _append(self, stretch: Stretch) -> None:
        """Work out when the rows of `stretch` end."""
        self._timeline.ends += self._decode_ends(
            stretch.start_ns,
            stretch.num_decodes,
            stretch.context,
            stretch.context_sq,
            stretch.count,
        )

    def _append_tail(self, stretch: Stretch) -> bool:
        """The row after the last of `stretch`, without those who get their last token in that.
        False if nobody is left; no row if blocks do not suffice."""
        scheduler, timeline = self._scheduler, self._timeline
        cohort = scheduler.cohort
        count = stretch.count
        row = cohort.row + count
        size = gaps = stretch.num_decodes
        context = stretch.context + count * size
        context_sq = stretch.context_sq + count * (stretch.context + context)
        need = cohort.demand(row)
        for seq in cohort.with_last_token_in(row - 1):
            gaps -= 1
            if not seq.overruns:
                last = seq.offset + row
                size -= 1
                context -= last
                context_sq -= last * last
                need -= last % cohort.block_size == 1 % cohort.block_size
        if not size:
            return False
        used = timeline.used[-1] + need
        if used <= scheduler.blocks.num_blocks:
            shape = self._shape
            shape.num_decodes = shape.num_sampled = size
            shape.decode_context = context
            shape.decode_context_sq = context_sq
            end_ns = timeline.ends[-1] + self._cost.step_ns(shape)
            tail = Stretch(
                1,
                -1,
                stretch.num_running,
                stretch.num_waiting,
                size,
                context,
                context_sq,
                gaps,
            )
            timeline.add_foreseen(tail, end_ns, used)
            self._count += 1
            self._has_tail = True
        return True

    def cut(self, planned: int) -> None:
        """Take back the rows, there are some, after the first `planned` of the timeline: they
        will not be as foreseen."""
        self._count -= self._timeline.keep(planned)
        self._has_tail = False
        if self._count + 1 < self._most:
            self._most = max(LEAST_AHEAD, 2 * self._count)

    def take_up(self, planned: int) -> None:
        """The first `planned` rows of the timeline have come true."""
        timeline, scheduler = self._timeline, self._scheduler
        count = min(planned, len(timeline.ends)) - timeline.planned
        if count <= 0:
            return
        self._count -= count
        with_tail = self._has_tail and not self._count
        scheduler.take_up(count, with_tail, self._since, timeline.depth)
        timeline.planned += count
        blocks = scheduler.blocks
        taken = timeline.used[timeline.planned - 1] - (blocks.num_blocks - blocks.free)
        if taken:
            blocks.take(taken)
        if with_tail:
            self._has_tail = False
