"""vLLM's loop over the running list, for the rows in which order matters.

When tokens or blocks do not suffice for every running sequence, who comes first decides. Then
the running sequences are visited one by one, exactly as in vLLM V1, and the cohort is corrected
for those that got nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.engine.fast.prefill import describe_chunk
from sim.engine.fast.sequence import DECODE, DRAINING, WAITING, FastSequence
from sim.engine.fast.timeline import Row

if TYPE_CHECKING:
    from sim.engine.fast.scheduler import FastScheduler


class Walk:
    """One visit of the running list, for `row`."""

    def __init__(self, scheduler: FastScheduler, row: int, limit: int) -> None:
        """`limit`: most tokens for one sequence."""
        self.budget = scheduler.rules.budget
        self.num_preempted = 0
        self._scheduler = scheduler
        self._row = row
        self._limit = limit
        self._given: dict[FastSequence, int] = {}  # tokens, in schedule order

    def run(self) -> None:
        """Give every sequence its tokens; preempt where blocks are lacking."""
        scheduler, row = self._scheduler, self._row
        blocks = scheduler.blocks
        order = list(scheduler.running)
        place = 0
        while place < len(order) and self.budget > 0:
            seq = order[place]
            scheduler.at_admission = seq.admission
            if seq.stage is DRAINING:
                place += 1
                continue
            decodes = seq.stage is DECODE
            computed = seq.offset + row - 1 if decodes else seq.computed
            wanted = 1 if decodes else seq.known - computed
            count = min(wanted, self._limit, self.budget)
            held = scheduler.blocks_held(seq, row)
            need = -(-(computed + count) // scheduler.block_size) - held
            while need > blocks.free:
                victim = self._pick_victim(order)
                at = order.index(victim)
                del order[at]
                place -= at < place
                self._preempt(victim)
                if victim is seq:
                    break
            if seq.stage is WAITING:
                continue  # it preempted itself; the next has moved to its place
            self._given[seq] = count
            self.budget -= count
            blocks.take(need)
            if not decodes:
                seq.computed += count
                seq.held += need
                if scheduler.cache is not None:
                    scheduler.cache.register(seq, seq.computed)
            place += 1

    def _pick_victim(self, order: list[FastSequence]) -> FastSequence:
        if self._scheduler.keyed:
            return max(order, key=lambda s: (s.order_key, s.request.arrival_ns, s.request.uid))
        return order[-1]

    def _preempt(self, victim: FastSequence) -> None:
        given = self._given.pop(victim, None)
        if given is not None:
            self.budget += given
        self._scheduler.preempt(victim, self._row, given or 0)
        self.num_preempted += 1

    def fill(self, plan: Row) -> None:
        """Enter what was given into the plan, and correct the books for who went without."""
        scheduler, row, cohort = self._scheduler, self._row, self._scheduler.cohort
        scheduler.at_admission = -1
        plan.num_decodes = 0
        for seq, count in self._given.items():
            if seq.stage is DECODE:
                context = seq.offset + row
                plan.num_decodes += 1
                plan.num_sampled += 1
                plan.context += context
                plan.context_sq += context * context
                plan.num_gaps += seq.has_token(row - 1) and seq.has_token(row)
                if seq in scheduler.starved:
                    plan.late.append((seq, seq.spans[-1][1]))
            else:
                describe_chunk(seq, count, plan)
        hungry = [
            seq for seq in scheduler.running if seq.stage is DECODE and seq not in self._given
        ]
        scheduler.starved = []
        for seq in hungry:
            cohort.remove(seq)
            if seq in scheduler.overrunning:  # it had all its tokens
                scheduler.overrunning.remove(seq)
                seq.stage = DRAINING
                seq.overruns = False
                continue
            seq.known = scheduler.progress(seq)
            seq.end_span(row - 1)
            seq.span_start = row + 1
            seq.offset -= 1
            seq.last_row += 1
            cohort.add(seq)
            cohort.expect(seq)
            scheduler.starved.append(seq)
