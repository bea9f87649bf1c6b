"""The scheduler of one engine: which sequences get how many tokens in the next step.

By default it decides exactly as vLLM V1 (0.33.0) does. It knows no clock: `schedule()` plans a
step, `update()` takes in what it produced, and with steps in flight the two may be apart.
"""

from __future__ import annotations

from sim.engine.config import EngineConfig
from sim.engine.freeform import follow
from sim.engine.kv_cache import KVCache
from sim.engine.plan import Budget, StepPlan, StepResult
from sim.engine.rules import Rules
from sim.engine.sequence import Sequence, Stage
from sim.engine.view import View
from sim.protocols import EvictionPolicy, SchedulingPolicy


class Scheduler:
    """Queues, plans and books of one engine.

    Invariants: a sequence is in `waiting` or in `running`, never both, until it finishes;
    `running` is in order of admission; blocks are held by running sequences, and by `lingering`
    ones, which have finished in a batch that has not.
    """

    def __init__(
        self,
        config: EngineConfig,
        policy: SchedulingPolicy | None = None,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        """Without policies: vLLM's."""
        policy = policy if policy is not None else SchedulingPolicy()
        self.config = config
        self.view = View(self)
        self.rules = Rules(config, policy, self.view)
        self.cache = KVCache(config, policy.layout, eviction)
        self.waiting = self.rules.new_queue()
        self.running: list[Sequence] = []
        self.lingering: list[Sequence] = []
        self.has_unseen_finish = False
        """Something finished or was aborted since the last `schedule()`. vLLM then calls it once
        more even with nothing to do."""

        self._passed_over: set[Sequence] = set()  # in some step since they were queued
        self._stagger = config.pipeline_parallel_size if config.async_scheduling else 1
        self._num_schedules = 0
        self._executed_steps = 0
        self._last_prefill_step = -config.prefill_schedule_interval
        self._saturated = False  # the last step that could admit left sequences waiting
        self._batch_open = False  # whole batches: more may join

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
            self._passed_over.discard(seq)
        self._end(seq)
        return True

    def _end(self, seq: Sequence) -> None:
        seq.stage = Stage.FINISHED
        self.cache.forget(seq)
        self.has_unseen_finish = True

    # -- planning

    def schedule(self) -> StepPlan:
        """Plan the next step. It may be empty; sequences may have been preempted for it."""
        rules, config = self.rules, self.config
        self._num_schedules += 1
        self.has_unseen_finish = False
        plan = StepPlan()
        if rules.displaces:
            for seq in rules.displaced(self.running):
                self.running.remove(seq)
                self.preempt(seq, plan)
        tokens, max_running = rules.limits()
        budget = Budget(
            tokens,
            config.max_num_batched_tokens,
            config.draft_slots,
            self._most_per_sequence(),
            max_running,
            self._holds_prefills(),
        )
        wish = rules.plan() if rules.plans_freely else None
        if wish is not None:
            follow(wish, self, plan, budget)
        elif rules.compose == "mixed":
            self._compose_mixed(plan, budget)
        elif rules.compose == "prefill-first":
            self._compose_prefills(plan, budget)
            if not plan:
                self._schedule_running(plan, budget)
        else:
            self._compose_whole_batch(plan, budget)
        if plan:
            self._executed_steps += 1
        self._advance(plan)
        return plan

    def _compose_mixed(self, plan: StepPlan, budget: Budget) -> None:
        """vLLM V1: running sequences first; newcomers only if nobody had to be preempted."""
        displaced = len(plan.preempted)
        carries_prefill = has_chunk = self._schedule_running(plan, budget)
        if len(plan.preempted) == displaced:
            carries_prefill |= self._schedule_waiting(plan, budget, has_chunk)
            if not budget.hold_prefills:
                self._saturated = len(self.waiting) > len(self._passed_over)
        if carries_prefill:
            self._last_prefill_step = self._executed_steps + bool(plan)

    def _compose_prefills(self, plan: StepPlan, budget: Budget) -> None:
        """A step of prefills alone: chunks in progress, then newcomers."""
        displaced = len(plan.preempted)
        has_chunk = self._schedule_running(plan, budget, chunks_only=True)
        if len(plan.preempted) == displaced:
            self._schedule_waiting(plan, budget, has_chunk)

    def _compose_whole_batch(self, plan: StepPlan, budget: Budget) -> None:
        """FasterTransformer: a batch forms when the last one is done, then runs to its end."""
        if not self.running:
            self._dissolve_batch()
            self._batch_open = True
        if self._batch_open:
            budget.max_running -= len(self.lingering)
            self._compose_prefills(plan, budget)
            self._batch_open = bool(plan)
        if not plan:
            self._schedule_running(plan, budget)

    def _dissolve_batch(self) -> None:
        for seq in self.lingering:
            self.cache.forget(seq)
        self.lingering.clear()

    def _schedule_running(self, plan: StepPlan, budget: Budget, chunks_only: bool = False) -> bool:
        """Give every running sequence, in order of admission, what it wants and what is left.

        A sequence that finds no block preempts others. Returns whether a prefill chunk is in.
        """
        cache, running = self.cache, self.running
        size, windowed, lookahead = cache.block_size, cache.window is not None, cache.lookahead
        longest = self.config.max_model_len - 1  # leaves a place for the token to be sampled
        per_sequence, staggered = budget.per_sequence, self._stagger > 1
        hold_prefills, has_chunk = budget.hold_prefills, False
        add_seq, add_tokens = plan.seqs.append, plan.num_tokens.append
        add_computed, take = plan.num_computed.append, budget.take
        left, place = budget.left, 0
        while place < len(running) and left > 0:
            seq = running[place]
            computed = seq.num_computed_tokens
            in_advance, drafts = seq.num_placeholders, seq.num_drafts
            is_chunk = seq.is_prefill_chunk
            held_back = hold_prefills if is_chunk else chunks_only
            if in_advance and computed + 2 - in_advance >= seq.max_length:
                # Steps in flight surely bring it to its last token, even if every draft in them
                # is rejected; so another step would be for nothing.
                held_back = True
            if held_back or (staggered and self._num_schedules < seq.next_decode):
                place += 1
                continue
            wanted = seq.num_tokens + drafts + in_advance - computed
            if wanted > 1:
                if 0 < per_sequence < wanted:
                    wanted = per_sequence
                if wanted > left:
                    wanted = left
            if wanted > longest - computed:
                wanted = longest - computed
            if wanted <= 0:
                place += 1
                continue
            end = computed + wanted
            if windowed or end + lookahead > len(seq.blocks) * size:
                if not cache.allocate(seq, wanted):
                    place = self._make_room(seq, wanted, place, plan, budget)
                    left = budget.left
                    if seq.stage is not Stage.RUNNING:
                        continue  # it preempted itself; the next has moved to its place
            elif end // size > seq.num_registered:
                cache.register(seq, end)
            add_seq(seq)
            add_tokens(wanted)
            add_computed(computed)
            left = take(wanted)
            if is_chunk:
                has_chunk = True
            if drafts:
                in_step = end - seq.num_tokens - in_advance
                if in_step > 0:
                    plan.drafts[seq] = min(drafts, in_step)
                seq.num_drafts = 0
            place += 1
        plan.num_running = len(plan.seqs)
        return has_chunk

    def _make_room(
        self, seq: Sequence, num_tokens: int, place: int, plan: StepPlan, budget: Budget
    ) -> int:
        """Preempt until `seq`, at `place` in `running`, has its blocks or is a victim itself;
        its place afterwards."""
        running = self.running
        while True:
            victim = self.rules.pick_victim(running)
            at = running.index(victim)
            del running[at]
            if at < place:
                place -= 1
                given = plan.drop(victim)
                if given is not None:
                    budget.give_back(given)
            self.preempt(victim, plan)
            if victim is seq or self.cache.allocate(seq, num_tokens):
                return place

    def _schedule_waiting(self, plan: StepPlan, budget: Budget, has_chunk: bool) -> bool:
        """Admit waiting sequences in order until one does not fit.

        `has_chunk`: a running prefill is in the step. Returns whether a sequence with more than
        its last token to compute was admitted.
        """
        config, cache, waiting, running = self.config, self.cache, self.waiting, self.running
        has_prefill = False
        passed_over: list[Sequence] = []
        while budget.left > 0 and len(waiting) and len(running) < budget.max_running:
            seq = waiting.peek()
            if seq.num_stale:
                # Admitted now, it might sample again a token that is about to be delivered.
                passed_over.append(waiting.pop())
                self._passed_over.add(seq)
                continue
            hit = cache.find_hit(seq)
            computed = len(hit) * cache.block_size
            is_prefill = computed < seq.num_tokens - 1
            if budget.hold_prefills and is_prefill:
                break
            num_tokens = seq.num_tokens - computed
            # A decode that joins a batch of verifications is padded to their size.
            padded = (
                config.num_speculative_tokens > 0
                and num_tokens == 1
                and not has_chunk
                and (plan.num_running > 0 or computed > 0)
                and computed + config.decode_query_len + 1 <= config.max_model_len
            )
            if padded:
                num_tokens = config.decode_query_len
                if num_tokens > budget.left:
                    break
            if 0 < budget.per_sequence < num_tokens:
                num_tokens = budget.per_sequence
            if num_tokens > budget.left:
                if not config.enable_chunked_prefill:
                    break
                num_tokens = budget.left
            if not self.admit(seq, hit, num_tokens):
                break
            waiting.pop()
            self.start(seq, plan, budget, num_tokens, computed)
            has_prefill |= is_prefill
            if padded:
                plan.drafts[seq] = config.num_speculative_tokens
                plan.padded.add(seq)
        waiting.put_back_all(passed_over)
        return has_prefill

    def admit(self, seq: Sequence, hit: list[int], num_tokens: int) -> bool:
        """Allocate for a waiting sequence, if the rules of admission allow it."""
        rules = self.rules
        return self.cache.admit(
            seq,
            hit,
            num_tokens,
            whole_must_fit=self.config.scheduler_reserve_full_isl,
            spare_blocks=rules.spare_blocks(bool(self.running)),
            reserved_tokens=rules.reserved_tokens(seq) if rules.reserves else 0,
        )

    def start(
        self, seq: Sequence, plan: StepPlan, budget: Budget, num_tokens: int, computed: int
    ) -> None:
        """An admitted sequence, out of the queue, joins the running ones and the step."""
        self._passed_over.discard(seq)
        self.running.append(seq)
        seq.stage = Stage.RUNNING
        seq.num_computed_tokens = computed
        plan.add(seq, num_tokens, computed)
        budget.take(num_tokens)
        if self.rules.hears_admissions:
            self.rules.on_admit(seq)

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

    def _most_per_sequence(self) -> int:
        """`long_prefill_token_threshold`; a sequence that is alone has nobody to starve."""
        config = self.config
        threshold = config.long_prefill_token_threshold
        present = len(self.running) + len(self.waiting)
        if present <= 1 or not threshold:
            return 0
        if config.long_prefill_token_threshold_adaptive:
            return max(threshold, config.max_num_batched_tokens // present)
        return threshold

    def preempt(self, seq: Sequence, plan: StepPlan) -> None:
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
        samples, next_decode = plan.samples, self._num_schedules + self._stagger
        for seq, num_tokens in zip(plan.seqs, plan.num_tokens, strict=True):
            seq.num_computed_tokens = computed = seq.num_computed_tokens + num_tokens
            seq.in_flight += num_tokens
            seq.is_prefill_chunk = is_chunk = computed < seq.num_tokens + seq.num_placeholders
            samples.append(not is_chunk)
            if asynchronous and not is_chunk:
                seq.num_placeholders += 1 + plan.drafts.get(seq, 0) if k else 1
                seq.num_drafts = k
                seq.next_decode = next_decode

    def update(self, plan: StepPlan, sampled: list[int]) -> StepResult:
        """Take in the output of a step: tokens sampled per entry (accepted drafts + 1; 0 for
        entries that do not sample). Steps are updated in the order they were planned."""
        result = StepResult([], [])
        new_tokens, finished = result.new_tokens, result.finished
        max_model_len, speculative = self.config.max_model_len, self.config.speculative
        cache, size, gone = self.cache, self.cache.block_size, Stage.FINISHED
        for seq, num_tokens, count in zip(plan.seqs, plan.num_tokens, sampled, strict=True):
            in_flight = seq.in_flight = seq.in_flight - num_tokens
            stale = seq.num_stale > 0
            if stale:
                seq.num_stale -= num_tokens
            if not count or seq.stage is gone:
                new_tokens.append(0)
                continue
            if speculative and not stale:
                self._roll_back_rejected(seq, plan.drafts.get(seq, 0), count)
            kept = count if count == 1 else self._until_complete(seq, count)
            seq.num_output_tokens = num_outputs = seq.num_output_tokens + kept
            seq.num_tokens = known = seq.num_tokens + kept
            new_tokens.append(kept)
            if not stale and (seq.num_placeholders > 0 or speculative):
                if count != kept:
                    seq.num_computed_tokens -= count - kept
                if seq.num_placeholders > 0:
                    seq.num_placeholders -= count
                processed = seq.num_computed_tokens - in_flight
                if processed // size > seq.num_registered:
                    cache.register(seq, processed)
            if num_outputs >= seq.stop_after or known >= max_model_len:
                finished.append(seq)
        if self.rules.hears_tokens:
            self.rules.on_tokens(_service(plan, new_tokens))
        if finished:
            self._retire(finished)
        return result

    def _until_complete(self, seq: Sequence, count: int) -> int:
        """Of `count` sampled tokens, those up to the end of the sequence (checked after each)."""
        room = self.config.max_model_len - seq.num_tokens
        return max(1, min(count, seq.stop_after - seq.num_output_tokens, room))

    @staticmethod
    def _roll_back_rejected(seq: Sequence, drafts: int, count: int) -> None:
        """Of `drafts` that were computed, all but `count - 1` were for nothing."""
        if drafts:
            rejected = drafts - (count - 1)
            if seq.num_computed_tokens > 0:
                seq.num_computed_tokens -= rejected
            if seq.num_placeholders > 0:
                seq.num_placeholders -= rejected

    def _retire(self, finished: list[Sequence]) -> None:
        """Take finished sequences out of their queues and free their blocks, in order."""
        for seq in finished:
            if seq.stage is not Stage.RUNNING:  # its last output was in flight when preempted
                self.waiting.remove(seq)
                self._passed_over.discard(seq)
            if self.rules.compose == "whole-batch" and seq.blocks:
                seq.stage = Stage.FINISHED
                self.lingering.append(seq)
                self.has_unseen_finish = True
            else:
                self._end(seq)
        self.running = [seq for seq in self.running if seq.stage is not Stage.FINISHED]
        if not self.running:
            self._dissolve_batch()

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
        assert self._passed_over <= set(waiting), "a sequence passed over does not wait"
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
        self.cache.check_integrity(waiting + self.running + self.lingering)


def _service(plan: StepPlan, new_tokens: list[int]) -> dict[str, list[int]]:
    """Prompt tokens computed and tokens generated in a step, by tenant."""
    served: dict[str, list[int]] = {}
    for i, seq in enumerate(plan.seqs):
        computed = plan.num_computed[i]
        prompt = min(computed + plan.num_tokens[i], seq.prompt_tokens) - computed
        totals = served.setdefault(seq.request.tenant, [0, 0])
        totals[0] += max(prompt, 0)
        totals[1] += new_tokens[i]
    return served
