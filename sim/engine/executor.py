"""Who executes a step: a cost model here, the real engine elsewhere, behind one protocol."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from sim.cost.interface import CostModel, StepShape
from sim.engine.config import EngineConfig
from sim.engine.plan import StepPlan
from sim.engine.sequence import Sequence


@dataclass(slots=True)
class StepOutcome:
    """What executing a step took and gave."""

    stages_ns: Seq[int]
    """Duration in each pipeline stage, in order; one value without pipeline parallelism."""
    sampled: list[int]
    """Tokens sampled per entry of the plan: 0 where nothing is sampled, else the accepted drafts
    and one more. Not cut at the sequence's end."""
    drafts: list[int] | None = None
    """Drafts proposed per entry for its next verification; None without speculation, and with
    asynchronous scheduling, where the scheduler assumes a full set."""


class Executor(Protocol):
    """Runs the steps of one engine, in the order in which they are planned."""

    def execute(self, plan: StepPlan, shape: StepShape) -> StepOutcome:
        """Execute a plan that is not empty. `shape` is its `step_shape`."""
        ...


class Acceptance(Protocol):
    """How well drafts do. Deterministic: the answer for a verification does not depend on when,
    or in which batch, it happens."""

    def accepted(self, seq: Sequence, verification: int, num_drafts: int) -> int:
        """Of `num_drafts`, how many the sequence's `verification`-th check (from 0) accepts."""
        ...

    def proposed(self, seq: Sequence, proposal: int, most: int) -> int:
        """Drafts in its `proposal`-th set (from 0), at most `most`."""
        ...


@dataclass(frozen=True)
class AcceptanceRate:
    """Each draft is accepted with probability `rate`, given that all before it were.

    `rates`, where given, are the probabilities by position; the last holds for all later ones.
    """

    rates: tuple[float, ...] = (0.7,)
    seed: int = 0

    def accepted(self, seq: Sequence, verification: int, num_drafts: int) -> int:
        state = _mix(self.seed, seq.request.uid, verification)
        for position in range(num_drafts):
            state = _mix(state, position, 0)
            rate = self.rates[min(position, len(self.rates) - 1)]
            if state >= rate * (1 << 64):
                return position
        return num_drafts

    def proposed(self, seq: Sequence, proposal: int, most: int) -> int:
        return most


def _mix(a: int, b: int, c: int) -> int:
    """64 well-mixed bits of three numbers (the finaliser of SplitMix64)."""
    z = (a * 0x9E3779B97F4A7C15 + b * 0xBF58476D1CE4E5B9 + c * 0x94D049BB133111EB) % (1 << 64)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % (1 << 64)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % (1 << 64)
    return z ^ (z >> 31)


class ModelledExecutor:
    """A cost model's durations, and drafts that do as well as `acceptance` says.

    With pipeline parallelism `CostModel.step_ns` is the time of one stage (its largest). A cost
    model may say more with `stages_ns(shape)`; otherwise all stages take as long.
    """

    def __init__(
        self, config: EngineConfig, cost: CostModel, acceptance: Acceptance | None = None
    ) -> None:
        self._cost = cost
        self._stages_ns: Callable[[StepShape], Seq[int]] = getattr(
            cost, "stages_ns", self._equal_stages
        )
        self._num_stages = config.pipeline_parallel_size
        self._num_drafts = config.num_speculative_tokens
        self._proposes = config.speculative and not config.async_scheduling
        self._acceptance: Acceptance = acceptance if acceptance is not None else AcceptanceRate()
        self._verified: dict[Sequence, int] = {}
        self._proposed: dict[Sequence, int] = {}

    def execute(self, plan: StepPlan, shape: StepShape) -> StepOutcome:
        stages_ns = self._stages_ns(shape)
        if not self._num_drafts:
            return StepOutcome(stages_ns, [int(samples) for samples in plan.samples])
        if len(self._verified) > 2 * len(plan.seqs) + 1024:
            self._forget_finished()
        sampled = [
            1 + self._accepted(seq, plan) if samples else 0
            for seq, samples in zip(plan.seqs, plan.samples, strict=True)
        ]
        if not self._proposes:
            return StepOutcome(stages_ns, sampled)
        drafts = [
            self._draft(seq) if samples else 0
            for seq, samples in zip(plan.seqs, plan.samples, strict=True)
        ]
        return StepOutcome(stages_ns, sampled, drafts)

    def _equal_stages(self, shape: StepShape) -> Seq[int]:
        return (self._cost.step_ns(shape),) * self._num_stages

    def _accepted(self, seq: Sequence, plan: StepPlan) -> int:
        drafts = plan.drafts.get(seq, 0)
        if not drafts or seq in plan.padded:
            return 0
        k = self._verified.get(seq, 0)
        self._verified[seq] = k + 1
        return self._acceptance.accepted(seq, k, drafts)

    def _draft(self, seq: Sequence) -> int:
        k = self._proposed.get(seq, 0)
        self._proposed[seq] = k + 1
        return self._acceptance.proposed(seq, k, self._num_drafts)

    def _forget_finished(self) -> None:
        self._verified = {seq: k for seq, k in self._verified.items() if not seq.finished}
        self._proposed = {seq: k for seq, k in self._proposed.items() if not seq.finished}


def step_shape(plan: StepPlan) -> StepShape:
    """A plan as the cost model sees it."""
    num_decodes = context = context_sq = decode_tokens = 0
    prefills: list[tuple[int, int]] = []
    drafts = plan.drafts
    for seq, num_tokens, computed in zip(
        plan.seqs, plan.num_tokens, plan.num_computed, strict=True
    ):
        if computed >= seq.prompt_tokens and (
            num_tokens == 1 or num_tokens == 1 + drafts.get(seq, 0)
        ):
            num_decodes += 1
            decode_tokens += num_tokens
            context += computed + 1
            context_sq += (computed + 1) * (computed + 1)
        else:
            prefills.append((num_tokens, computed))
    return StepShape(
        num_decodes=num_decodes,
        decode_context=context,
        decode_context_sq=context_sq,
        prefills=prefills,
        num_sampled=sum(plan.samples),
        decode_tokens=decode_tokens,
    )
