"""The scheduler of one engine: which sequences get how many tokens in the next step.

By default it decides exactly as vLLM V1 (0.33.0) does. It knows no clock: `schedule()` plans a
step, `update()` takes in what it produced, and with steps in flight the two may be apart.
"""

from __future__ import annotations

from sim.engine.config import EngineConfig
from sim.engine.kv_cache import KVCache
from sim.engine.plan import Budget, StepPlan, StepResult
from sim.engine.queues import FcfsQueue, KeyQueue, WaitingQueue
from sim.engine.sequence import Sequence, Stage


class Scheduler:
    """Queues, plans and books of one engine.

    Invariants: a sequence is in `waiting` or in `running`, never both, until it finishes;
    `running` is in order of admission; blocks are held by running sequences only.
    """

    def __init__(self, config: EngineConfig, cache: KVCache | None = None) -> None:
        self.config = config
        self.cache = cache if cache is not None else KVCache(config)
        self.by_priority = config.policy == "priority"
        self.waiting: WaitingQueue = (
            KeyQueue(lambda seq: seq.priority) if self.by_priority else FcfsQueue()
        )
        self.running: list[Sequence] = []
        self.has_unseen_finish = False
        """Something finished or was aborted since the last `schedule()`. vLLM then calls it once
        more even with nothing to do."""

        # Sequences passed over because output of theirs is still in flight.
        self._deferred: set[Sequence] = set()
        self._step = 0
        self._executed_steps = 0
        self._last_prefill_step = -config.prefill_schedule_interval
        self._saturated = False  # the last step that could admit left sequences waiting

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    @property
    def has_work(self) -> bool:
        """Whether the engine should call `schedule()`."""
        return self.has_unfinished or self.has_unseen_finish

    # -- requests come and go

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.add(seq)

    def abort(self, seq: Sequence) -> bool:
        """Drop a sequence at once; False when it has finished already."""
        if seq.stage is Stage.FINISHED:
            return False
        if seq.stage is Stage.RUNNING:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
            self._deferred.discard(seq)
        self._finish(seq)
        return True

    def _finish(self, seq: Sequence) -> None:
        seq.stage = Stage.FINISHED
        self.cache.forget(seq)
        self.has_unseen_finish = True

    # -- planning

    def schedule(self) -> StepPlan:
        """Plan the next step. It may be empty; sequences may have been preempted for it."""
        config = self.config
        self._step += 1
        self.has_unseen_finish = False
        plan = StepPlan()
        budget = Budget(config.token_budget, config.max_num_batched_tokens, config.draft_slots)
        hold_prefills = self._holds_prefills()
        most_per_seq = self._prefill_threshold()

        chunk_scheduled = self._schedule_running(plan, budget, hold_prefills, most_per_seq)
        plan.num_running = len(plan.seqs)
        prefill_admitted = False
        if not plan.preempted:
            prefill_admitted = self._schedule_waiting(
                plan, budget, hold_prefills, most_per_seq, chunk_scheduled
            )
            if not hold_prefills:
                self._saturated = len(self.waiting) > len(self._deferred)

        if plan:
            self._executed_steps += 1
        if chunk_scheduled or prefill_admitted:
            self._last_prefill_step = self._executed_steps
        self._advance(plan)
        return plan

    def _schedule_running(
        self, plan: StepPlan, budget: Budget, hold_prefills: bool, most_per_seq: int
    ) -> bool:
        """Give every running sequence, in order of admission, what it wants and what is left.

        A sequence that finds no block preempts others. Returns whether a prefill chunk is in.
        """
        config, cache, running = self.config, self.cache, self.running
        longest = config.max_model_len - 1  # leaves a place for the token to be sampled
        chunk_scheduled = False
        i = 0
        while i < len(running) and budget.left > 0:
            seq = running[i]
            if self._waits_for_output(seq) or (hold_prefills and seq.is_prefill_chunk):
                i += 1
                continue
            computed = seq.num_computed_tokens
            wanted = seq.num_tokens + seq.num_drafts + seq.num_placeholders - computed
            if 0 < most_per_seq < wanted:
                wanted = most_per_seq
            num_tokens = min(wanted, budget.left, longest - computed)
            if num_tokens <= 0:
                i += 1
                continue
            while not cache.allocate(seq, num_tokens):
                victim = self._pick_victim()
                place = running.index(victim)
                del running[place]
                if place < i:
                    i -= 1
                    given = plan.drop(victim)
                    if given is not None:
                        budget.give_back(given)
                self._preempt(victim, plan)
                if victim is seq:
                    break
            if seq.stage is Stage.PREEMPTED:
                if self.by_priority:
                    continue  # the ones behind it matter more and may fit now
                break
            plan.add(seq, num_tokens, computed)
            budget.take(num_tokens)
            chunk_scheduled |= seq.is_prefill_chunk
            if seq.num_drafts:
                drafts = num_tokens + computed - seq.num_tokens - seq.num_placeholders
                if drafts > 0:
                    plan.drafts[seq] = min(drafts, seq.num_drafts)
                seq.num_drafts = 0
            i += 1
        return chunk_scheduled

    def _schedule_waiting(
        self,
        plan: StepPlan,
        budget: Budget,
        hold_prefills: bool,
        most_per_seq: int,
        chunk_scheduled: bool,
    ) -> bool:
        """Admit waiting sequences in order until one does not fit.

        Returns whether one of them has more than its last token to compute.
        """
        config, cache, waiting, running = self.config, self.cache, self.waiting, self.running
        prefill_admitted = False
        passed_over: list[Sequence] = []
        while budget.left > 0 and len(waiting) and len(running) < config.max_num_admitted_seqs:
            seq = waiting.peek()
            if seq.num_stale:
                # Admitted now, it might sample again a token that is about to be delivered.
                passed_over.append(waiting.pop())
                self._deferred.add(seq)
                continue
            hit = cache.find_hit(seq)
            computed = len(hit) * cache.block_size
            is_prefill = computed < seq.num_tokens - 1
            if hold_prefills and is_prefill:
                break
            num_tokens = seq.num_tokens - computed
            padded = (
                config.num_speculative_tokens > 0
                and num_tokens == 1
                and not chunk_scheduled
                and (plan.num_running > 0 or computed > 0)
                and computed + config.decode_query_len + 1 <= config.max_model_len
            )
            if padded:
                num_tokens = config.decode_query_len
                if num_tokens > budget.left:
                    break
            if 0 < most_per_seq < num_tokens:
                num_tokens = most_per_seq
            if num_tokens > budget.left:
                if not config.enable_chunked_prefill:
                    break
                num_tokens = budget.left
            if not cache.admit(
                seq,
                hit,
                num_tokens,
                whole_must_fit=config.scheduler_reserve_full_isl,
                spare_blocks=cache.watermark_blocks if running else 0,
            ):
                break
            waiting.pop()
            self._deferred.discard(seq)
            running.append(seq)
            seq.stage = Stage.RUNNING
            seq.num_computed_tokens = computed
            plan.add(seq, num_tokens, computed)
            budget.take(num_tokens)
            prefill_admitted |= is_prefill
            if padded:
                plan.drafts[seq] = config.num_speculative_tokens
                plan.padded.add(seq)
        waiting.put_back_all(passed_over)
        return prefill_admitted

    def _holds_prefills(self) -> bool:
        """`prefill_schedule_interval`: let decodes run alone until enough steps have passed since
        the last one with prefill, unless the queue has backed up."""
        interval = self.config.prefill_schedule_interval
        return (
            interval > 1
            and not self._saturated
            and self._executed_steps + 1 - self._last_prefill_step < interval
            and any(not seq.is_prefill_chunk for seq in self.running)
        )

    def _prefill_threshold(self) -> int:
        """Most tokens for one sequence in this step; 0 is no limit. A sequence that is alone has
        nobody to starve."""
        config = self.config
        threshold = config.long_prefill_token_threshold
        present = len(self.running) + len(self.waiting)
        if present <= 1 or not threshold:
            return 0
        if config.long_prefill_token_threshold_adaptive:
            return max(threshold, config.max_num_batched_tokens // present)
        return threshold

    def _waits_for_output(self, seq: Sequence) -> bool:
        """Asynchronous scheduling: steps in flight surely bring it to `max_tokens`, even if every
        draft in them is rejected; so another step would be for nothing."""
        return (
            seq.num_placeholders > 0
            and seq.num_computed_tokens + 2 - seq.num_placeholders
            >= seq.prompt_tokens + seq.max_tokens
        )

    # -- preemption

    def _pick_victim(self) -> Sequence:
        """Whom to preempt: the last admitted, or the least important and latest of all."""
        if self.by_priority:
            return max(self.running, key=lambda seq: (seq.priority, seq.arrival))
        return self.running[-1]

    def _preempt(self, seq: Sequence, plan: StepPlan) -> None:
        """Send a sequence (already out of `running`) back to the queue. It will compute all its
        known tokens again."""
        self.cache.release(seq)
        seq.stage = Stage.PREEMPTED
        seq.num_lost_tokens = seq.num_computed_tokens
        seq.num_computed_tokens = 0
        seq.num_drafts = 0
        seq.num_placeholders = 0
        seq.num_stale = seq.in_flight
        seq.num_preemptions += 1
        self.waiting.put_back(seq)
        plan.preempted.append(seq)

    # -- books

    def _advance(self, plan: StepPlan) -> None:
        """Count the planned tokens as computed: the next step is planned on top of them."""
        asynchronous, k = self.config.async_scheduling, self.config.num_speculative_tokens
        for seq, num_tokens in zip(plan.seqs, plan.num_tokens, strict=True):
            seq.num_computed_tokens += num_tokens
            seq.in_flight += num_tokens
            seq.is_prefill_chunk = seq.num_computed_tokens < seq.num_tokens + seq.num_placeholders
            plan.samples.append(not seq.is_prefill_chunk)
            if asynchronous and not seq.is_prefill_chunk:
                seq.num_placeholders += 1 + plan.drafts.get(seq, 0)
                seq.num_drafts = k

    def update(self, plan: StepPlan, sampled: list[int]) -> StepResult:
        """Take in the output of a step: tokens sampled per entry (accepted drafts + 1; 0 for
        entries that do not sample). Steps are updated in the order they were planned."""
        speculative = self.config.speculative
        result = StepResult([0] * len(plan.seqs), [])
        for i, (seq, num_tokens) in enumerate(zip(plan.seqs, plan.num_tokens, strict=True)):
            seq.in_flight -= num_tokens
            stale = seq.num_stale > 0
            if stale:
                seq.num_stale -= num_tokens
            if seq.stage is Stage.FINISHED:
                continue
            count = sampled[i]
            if not count:
                continue
            drafts = plan.drafts.get(seq, 0)
            if drafts and not stale:
                rejected = drafts - (count - 1)
                if seq.num_computed_tokens > 0:
                    seq.num_computed_tokens -= rejected
                if seq.num_placeholders > 0:
                    seq.num_placeholders -= rejected
            had_placeholders = seq.num_placeholders > 0
            kept = self._append_outputs(seq, count)
            stopped = self._is_complete(seq)
            if not stale:
                seq.num_computed_tokens -= count - kept
                if had_placeholders:
                    seq.num_placeholders -= count
                if seq.stage is Stage.RUNNING and (had_placeholders or speculative):
                    self.cache.register(
                        seq, min(seq.num_computed_tokens - seq.in_flight, seq.num_tokens)
                    )
            result.new_tokens[i] = kept
            if stopped:
                result.finished.append(seq)
        self._retire(result.finished)
        return result

    def _append_outputs(self, seq: Sequence, count: int) -> int:
        """Append up to `count` sampled tokens, until the sequence is complete; how many."""
        room = min(
            seq.stop_after - seq.num_output_tokens, self.config.max_model_len - seq.num_tokens
        )
        kept = max(min(count, room), 1)  # completion is checked after each token
        seq.num_output_tokens += kept
        seq.num_tokens += kept
        return kept

    def _is_complete(self, seq: Sequence) -> bool:
        return (
            seq.num_output_tokens >= seq.stop_after or seq.num_tokens >= self.config.max_model_len
        )

    def _retire(self, finished: list[Sequence]) -> None:
        """Take finished sequences out of their queues and free their blocks, in order."""
        running = False
        for seq in finished:
            if seq.stage is Stage.RUNNING:
                running = True
            else:  # its last output was in flight when it was preempted
                self.waiting.remove(seq)
                self._deferred.discard(seq)
            self._finish(seq)
        if running:
            self.running = [seq for seq in self.running if seq.stage is not Stage.FINISHED]

    def update_drafts(self, plan: StepPlan, num_drafts: list[int]) -> None:
        """Synchronous speculation: drafts proposed after a step, per entry of its plan."""
        for seq, drafts in zip(plan.seqs, num_drafts, strict=True):
            if seq.stage is not Stage.FINISHED:
                seq.num_drafts = 0 if seq.is_prefill_chunk else drafts

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, tokens and blocks add up."""
        waiting = list(self.waiting)
        assert len(set(waiting) | set(self.running)) == len(waiting) + len(self.running), (
            "a sequence is queued twice"
        )
        assert len(self.running) <= self.config.max_num_seqs, "too many running"
        assert self._deferred <= set(waiting), "a deferred sequence does not wait"
        for seq in waiting:
            assert seq.stage in (Stage.WAITING, Stage.PREEMPTED), f"{seq} waits"
            assert not seq.blocks, f"{seq} waits and holds blocks"
            assert seq.num_computed_tokens == 0, f"{seq} waits with computed tokens"
        for seq in self.running:
            assert seq.stage is Stage.RUNNING, f"{seq} runs"
            assert 0 <= seq.in_flight <= seq.num_computed_tokens, f"{seq}: in flight"
            processed = seq.num_computed_tokens - seq.in_flight
            assert processed <= seq.num_tokens, f"{seq}: computed beyond known tokens"
            assert seq.num_tokens == seq.prompt_tokens + seq.num_output_tokens, f"{seq}: tokens"
            assert seq.num_tokens <= self.config.max_model_len, f"{seq}: too long"
        self.cache.check_integrity(waiting + self.running)
