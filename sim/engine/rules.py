"""What a scheduling policy declares and decides, in the form in which the scheduler asks for it.

Without a policy, and for everything a policy leaves alone, the answers are vLLM V1's.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral

from sim.engine.config import EngineConfig
from sim.engine.intake import reserved_tokens
from sim.engine.queues import FcfsQueue, KeyQueue, RekeyedQueue, WaitingQueue
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.protocols import Limits, Plan, SchedulerView, SchedulingPolicy, overrides

MOST_PREEMPTED = 10_000
"""Times a policy may preempt one request by its own choice: more is a policy in a loop."""


class Rules:
    """One policy on one engine. Hooks a policy does not define are never called."""

    def __init__(self, config: EngineConfig, policy: SchedulingPolicy, view: SchedulerView) -> None:
        if policy.preempt != "recompute":
            raise UserError(
                f"policy {type(policy).__name__}: preempt={policy.preempt!r} is not available yet; "
                "use 'recompute'"
            )
        self._config = config
        self._policy = policy
        self._view = view
        self.name = type(policy).__name__
        self.compose = policy.compose
        self.by_priority = config.policy == "priority" and policy.order == "fcfs"
        """vLLM's own priority scheduling, asked for by the engine's setting."""
        self.plans_freely = overrides(policy, "plan")
        self.displaces = overrides(policy, "displace")
        self.reserves = policy.reserve != "on-demand"
        self.hears_admissions = overrides(policy, "on_admit")
        self.hears_tokens = overrides(policy, "on_tokens")
        self.decides = any(
            overrides(policy, hook) for hook in ("plan", "displace", "victim", "limits")
        )
        """Whether it is the policy's doing when the engine gets nowhere."""
        self._picks_victims = overrides(policy, "victim")
        self._limits = overrides(policy, "limits")
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        self._always_spare = 0
        if policy.watermark is not None:
            self._always_spare = int(policy.watermark * config.num_blocks)
            self._watermark_blocks = 0

    def new_queue(self) -> WaitingQueue:
        policy, view = self._policy, self._view
        if self.by_priority:
            return KeyQueue(lambda seq: seq.priority)
        if policy.order == "key":
            return KeyQueue(lambda seq: policy.key(seq, view))
        if policy.order == "key-each-step":
            return RekeyedQueue(lambda seq: policy.key(seq, view))
        return FcfsQueue()

    def limits(self) -> tuple[int, int]:
        """(token budget, most running sequences) of this step."""
        config = self._config
        found = self._policy.limits(self._view) if self._limits else None
        if found is None:
            return config.token_budget, config.max_num_admitted_seqs
        if not isinstance(found, Limits) or not all(isinstance(n, Integral) for n in found):
            raise UserError(
                f"policy {self.name}: limits() gave {found!r}, not Limits of two counts"
            )
        return (
            min(found.max_num_batched_tokens, config.max_num_batched_tokens),
            min(found.max_num_seqs, config.max_num_seqs),
        )

    def pick_victim(self, running: list[Sequence]) -> Sequence:
        """Whom to preempt: the policy's choice, else the last admitted, or with keys the one with
        the largest key and the latest arrival."""
        if self._picks_victims:
            chosen = self._policy.victim(self._view)
            if chosen is not None:
                return self._running(chosen, running)
        if self.by_priority or self._policy.order == "key":
            return max(running, key=lambda seq: (seq.order_key, seq.arrival))
        if self._policy.order == "key-each-step":
            return max(running, key=lambda seq: (self._policy.key(seq, self._view), seq.arrival))
        return running[-1]

    def displaced(self, running: list[Sequence]) -> Iterable[Sequence]:
        """Whom to preempt before this step for the sake of waiting ones."""
        chosen = self._policy.displace(self._view)
        if not isinstance(chosen, Iterable):
            raise UserError(f"policy {self.name}: displace() gave {chosen!r}, not requests")
        return list(dict.fromkeys(self._running(seq, running) for seq in chosen))

    def _running(self, chosen: object, running: list[Sequence]) -> Sequence:
        for seq in running:
            if seq is chosen:
                self.check_patience(seq)
                return seq
        raise UserError(f"policy {self.name} preempts {chosen!r}, which is not running")

    def check_patience(self, seq: Sequence) -> None:
        """UserError when the policy is about to preempt `seq` for ever."""
        if seq.num_preemptions >= MOST_PREEMPTED:
            raise UserError(f"policy {self.name} has preempted {seq.id} {MOST_PREEMPTED:,} times")

    def spare_blocks(self, anything_runs: bool) -> int:
        """Blocks an admission must leave free."""
        return self._always_spare + (self._watermark_blocks if anything_runs else 0)

    def reserved_tokens(self, seq: Sequence) -> int:
        """Tokens to set blocks aside for when `seq` is admitted."""
        return reserved_tokens(self._config, self._policy, seq.request, seq.num_tokens)

    def plan(self) -> Plan | None:
        return self._policy.plan(self._view)

    def on_admit(self, seq: Sequence) -> None:
        self._policy.on_admit(seq, self._view)

    def on_tokens(self, served: dict[str, list[int]]) -> None:
        """`served`: prompt and output tokens by tenant."""
        for tenant, (prompt, output) in served.items():
            self._policy.on_tokens(tenant, prompt, output)
