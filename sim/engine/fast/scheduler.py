"""vLLM V1's scheduler on sums instead of lists. It knows rows of the step log, but no clock.

`plan` decides one row. In the common case (every decode gets its token and its block, and the
prefill chunks in progress what is left) nothing is done per decoding request. Otherwise the
running list is walked as vLLM does, in `walk.py`. Prefills are in `prefill.py`.
"""

from __future__ import annotations

from sim.engine.config import EngineConfig
from sim.engine.fast.blocks import Blocks
from sim.engine.fast.cohort import Cohort
from sim.engine.fast.prefill import admit, compute, next_chunks
from sim.engine.fast.prefix import PrefixBlocks
from sim.engine.fast.rules import NO_LIMIT, Rules
from sim.engine.fast.sequence import DECODE, DRAINING, GONE, PREFILL, WAITING, FastSequence, Stage
from sim.engine.fast.timeline import Row, Stretch
from sim.engine.fast.view import FastView
from sim.engine.fast.waiting import ArrivalQueue, KeyedQueue, Waiting
from sim.engine.fast.walk import Walk
from sim.protocols import SchedulingPolicy


class FastScheduler:
    """Who waits, who runs, who is how far.

    Invariants: `running` is in order of admission and holds the sequences in PREFILL (also in
    `prefilling`), DECODE (in the cohort) and DRAINING; whoever is preempted or finished while
    rows with tokens of theirs are in flight is in `leaving` until the last of them is delivered.
    """

    def __init__(self, config: EngineConfig, policy: SchedulingPolicy | None = None) -> None:
        """`policy` (default: vLLM's) is one that `why_plain` lets pass."""
        self.rules = Rules.of(config, policy)
        self.block_size = config.block_size
        usable = config.num_usable_blocks
        self.blocks: Blocks = Blocks(usable, config.block_size)
        self.cache: PrefixBlocks | None = None
        if config.enable_prefix_caching:
            self.blocks = self.cache = PrefixBlocks(usable, config.block_size, self.progress)

        self.view = FastView(self, config)
        self.keyed = True
        """Whether the queue has an order of its own; victims are then the last by that order."""
        if policy is not None and policy.order == "key":
            self.waiting: Waiting = KeyedQueue(
                lambda seq: policy.key(self.view.snapshot(seq), self.view)
            )
        elif config.policy == "priority":
            self.waiting = KeyedQueue(lambda seq: seq.request.priority)
        else:
            self.waiting = ArrivalQueue()
            self.keyed = False
        self.num_waiting = 0
        self.cohort = Cohort(config.block_size)
        self.running: dict[FastSequence, None] = {}
        self.prefilling: list[FastSequence] = []
        self.leaving: list[FastSequence] = []
        """Whose last token is scheduled, in order of delivery."""
        self.overrunning: list[FastSequence] = []
        """Of those, the ones that are still in the cohort, for one row more."""
        self.starved: list[FastSequence] = []
        """Members of the cohort that had no token in the last row."""
        self.head_is_stuck = False
        """The first in the queue lacks blocks, and will until something leaves."""
        self.num_preempted = 0
        """Victims since the last row."""

        self.row = -1
        """Last planned row, or the one being planned."""
        self.committed = -1
        """Last committed row."""
        # Last committed row when `row` was planned, and when the one before was.
        self._seen = self._seen_before = -1
        self.at_admission = NO_LIMIT
        """While `row` is being planned: sequences admitted before this one had their turn."""
        self.num_admissions = 0

    # -- requests come and go

    def add(self, seq: FastSequence) -> bool:
        """Queue a new sequence. Whether that changes nothing for the rows foreseen."""
        crowded = self.num_waiting > 0 and (
            self.head_is_stuck or len(self.running) >= self.rules.max_running
        )
        self.num_waiting += 1
        behind = self.waiting.add(seq)
        if not behind:
            self.head_is_stuck = False
        return behind and crowded

    def drop(self, seq: FastSequence) -> None:
        """A sequence leaves, finished or aborted."""
        if seq.stage is WAITING:
            self.num_waiting -= 1
        else:
            self._stop(seq, self.row + 1)
        self.head_is_stuck = False
        seq.stage = GONE
        if self.cache is not None:
            self.cache.leave(seq)

    def preempt(self, seq: FastSequence, row: int, given: int) -> None:
        """Send a running sequence back to the queue. Of `row`, which is being planned, it had
        been `given` so many tokens and loses them again."""
        was_prefill = seq.stage is PREFILL
        self._stop(seq, row + (given > 0))
        if was_prefill:
            seq.was_computed = seq.computed - given
        else:
            seq.known = min(seq.offset + row, seq.prompt_tokens + seq.stop)
            seq.was_computed = seq.known - 1
            seq.end_span(min(row - 1, seq.last_row))
        seq.computed = 0
        seq.stage = WAITING
        seq.record.preemptions += 1
        self.waiting.put_back(seq)
        self.num_waiting += 1
        self.num_preempted += 1
        self.head_is_stuck = False

    def _stop(self, seq: FastSequence, next_row: int) -> None:
        """Take a running sequence out of the books; its blocks, up to those of the row before
        `next_row`, become free."""
        stage = seq.stage
        if stage is PREFILL:
            self.prefilling.remove(seq)
        else:
            seq.held = self.blocks_held(seq, next_row)
        if self.cache is not None:
            self.cache.register(seq, self.progress(seq))
        if stage is DECODE:
            self.cohort.remove(seq)
        self.blocks.release(seq)
        del self.running[seq]
        if self.overrunning and seq in self.overrunning:
            self.overrunning.remove(seq)
        if self.starved and seq in self.starved:
            self.starved.remove(seq)

    def blocks_held(self, seq: FastSequence, row: int) -> int:
        """Blocks of a running sequence when `row` is planned next."""
        if seq.stage is PREFILL:
            return seq.held
        tokens = seq.offset + row - 1
        if seq.stage is DRAINING:
            tokens = min(tokens, seq.offset + seq.last_row + seq.overruns)
        return -(-tokens // self.block_size)

    def progress(self, seq: FastSequence) -> int:
        """Tokens of a running sequence whose blocks vLLM has registered by now.

        When a row is planned: those it computes, as far as they are known. When its output comes:
        those it computed.
        """
        if seq.stage is PREFILL:
            return seq.computed
        if seq.last_row <= self.committed:
            return seq.offset + seq.last_row
        row, seen = self.row, self._seen
        if seq.admission >= self.at_admission:  # had no turn in `row` yet
            row, seen = row - 1, self._seen_before
        done = max(self._computed_until(seq, self.committed), seq.known)
        if seq.has_token(row) or (seq.overruns and row == seq.last_row + 1):
            known = self._computed_until(seq, seen) + 1
            done = max(done, min(known, self._computed_until(seq, row)))
        return done

    @staticmethod
    def _computed_until(seq: FastSequence, row: int) -> int:
        """Tokens computed when `row` had been, for a sequence that decodes: all but the last."""
        if 0 <= seq.span_start <= row:
            return seq.offset + min(row, seq.last_row)
        return seq.prompt_tokens + seq.tokens_until(row) - 1

    # -- last tokens

    def _retire(self) -> None:
        """Take those out of the cohort whose last token is in `row`, which has been planned."""
        for seq in self.cohort.pop_last_tokens(self.row):
            self.leaving.append(seq)
            if seq.stage is DECODE:
                if seq.overruns:
                    self.overrunning.append(seq)
                else:
                    self.cohort.remove(seq)
                    seq.stage = DRAINING

    def commit(self, row: int) -> list[FastSequence]:
        """The output of `row` is there: who had the last token in it, in schedule order. They
        still run (or wait, if they were preempted meanwhile)."""
        self.committed = row
        leaving = self.leaving
        if not leaving or leaving[0].last_row > row:
            return []
        finished = [seq for seq in leaving if seq.last_row <= row]
        del leaving[: len(finished)]
        return [seq for seq in finished if seq.stage is not GONE]

    # -- rows foreseen

    def take_up(self, count: int, seen: int, depth: int) -> None:
        """`count` rows with all of the cohort and nothing else have been planned as foreseen: the
        first when `seen` was committed, the others `depth` rows behind."""
        cohort = self.cohort
        cohort.advance(count)
        self.row += count
        if self.overrunning:
            self._end_overruns()
        if cohort.last_rows and cohort.last_rows[0][0] <= self.row:
            self._retire()
        if self.cache is not None:
            self._seen_before = self._seen if count == 1 else max(seen, self.row - 1 - depth)
            self._seen = max(seen, self.row - depth)

    def _end_overruns(self) -> None:
        for seq in self.overrunning:
            self.cohort.remove(seq)
            seq.stage = DRAINING
        self.overrunning.clear()

    # -- planning

    def is_steady(self) -> bool:
        """Whether the next rows hold the cohort's decodes and nothing else, until a last token,
        a shortage of blocks, an arrival or an abort."""
        if self.prefilling or self.overrunning or self.starved:
            return False
        return (
            not self.num_waiting
            or self.head_is_stuck
            or len(self.running) >= self.rules.max_running
        )

    def plan(self) -> Stretch | None:
        """Plan the next row; None when there is nothing to run. Then `num_preempted` may have
        grown."""
        self.row = row = self.row + 1
        self._seen_before, self._seen = self._seen, self.committed
        self.at_admission = -1
        cohort, blocks = self.cohort, self.blocks
        plan = Row()
        plan.num_decodes = decodes = cohort.size
        limit = NO_LIMIT
        if self.rules.threshold:
            limit = self.rules.most_per_sequence(len(self.running) + self.num_waiting)
        need = cohort.demand(row)
        budget = self.rules.budget - decodes
        chunks: list[tuple[FastSequence, int]] | None = []
        if budget < 0 or need > blocks.free:
            chunks = None
        elif self.prefilling:
            chunks = next_chunks(self, budget, limit, blocks.free - need)
        preempted = False
        if chunks is not None:
            plan.context, plan.context_sq = cohort.context, cohort.context_sq
            plan.num_sampled = decodes
            plan.num_gaps = decodes - len(self.overrunning)
            if need:
                blocks.take(need)
            for seq, count in chunks:
                compute(self, seq, count, plan)
                budget -= count
            if self.starved:
                self._end_starvation(plan)
        else:
            walk = Walk(self, row, limit)
            walk.run()
            walk.fill(plan)
            budget = walk.budget
            preempted = walk.num_preempted > 0
        if self.num_waiting and budget > 0 and not preempted:
            admit(self, budget, limit, plan)
        self.at_admission = NO_LIMIT
        if not plan.num_decodes and not plan.prefills:
            self.row = row - 1
            self._seen = self._seen_before
            return None
        self._complete(plan, row)
        plan.num_running = len(self.running)
        plan.num_waiting = self.num_waiting
        plan.num_preempted, self.num_preempted = self.num_preempted, 0
        plan.num_sampled += len(plan.completing)
        if (
            plan.prefills
            or plan.completing
            or plan.late
            or plan.num_preempted
            or plan.num_sampled != plan.num_decodes
        ):
            return plan
        return Stretch(
            1,
            -1,
            plan.num_running,
            plan.num_waiting,
            plan.num_decodes,
            plan.context,
            plan.context_sq,
            plan.num_gaps,
        )

    def _end_starvation(self, plan: Row) -> None:
        for seq in self.starved:
            plan.late.append((seq, seq.spans[-1][1]))
            plan.num_gaps -= 1
        self.starved.clear()

    def _complete(self, plan: Row, row: int) -> None:
        """The row is settled: count it, and let those that finished their prompt decode next."""
        cohort = self.cohort
        cohort.advance(1)
        if self.overrunning:
            self._end_overruns()
        for seq in plan.completing:
            self.prefilling.remove(seq)
            seq.offset = seq.known - row
            seq.last_row = row + seq.stop - (seq.known - seq.prompt_tokens) - 1
            seq.span_start = row
            if seq.spans:
                first, last = seq.spans[-1]
                if last == row - 1:
                    seq.span_start = first
                    seq.spans = seq.spans[:-1]
                    plan.num_gaps += 1
                else:
                    plan.late.append((seq, last))
            seq.stage = DRAINING
            if seq.last_row > row or seq.overruns:
                cohort.add(seq)
            cohort.expect(seq)
        if cohort.last_rows and cohort.last_rows[0][0] <= row:
            self._retire()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books agree with each other."""
        running = list(self.running)
        assert [s.admission for s in running] == sorted(s.admission for s in running), "order"
        stages = {stage: [s for s in running if s.stage is stage] for stage in Stage}
        assert not (stages[WAITING] + stages[GONE]), "runs without running"
        assert self.prefilling == stages[PREFILL], "prefilling"
        assert self.cohort.row == self.row + 1, "rows"
        self.cohort.check_integrity(stages[DECODE])
        for seq in stages[DRAINING] + self.overrunning:
            assert seq in self.leaving or seq.last_row >= self.row, f"{seq} never leaves"
        rows = [seq.last_row for seq in self.leaving]
        assert rows == sorted(rows), "order of leaving"
        for seq in running:
            seq.held = self.blocks_held(seq, self.row + 1)
        self.blocks.check_integrity(running)
