"""The real engine behind the simulator's `Executor` protocol: durations are measured."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from calibrate.engine.clock import work_clock
from calibrate.engine.ops import NoRecorder, Recorder
from calibrate.engine.runner import ModelRunner
from sim.cost.interface import StepShape
from sim.engine.config import EngineConfig
from sim.engine.executor import StepOutcome
from sim.engine.plan import StepPlan
from sim.errors import RunEnded, UserError


class OutOfMemory(RunEnded):
    """The device could not hold a step. What was served before it stays valid."""


class StepRecorder(Recorder, Protocol):
    """Operator times of one step."""

    def start(self) -> None: ...

    def finish(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class MeasuredStep:
    """One executed step."""

    shape: StepShape
    ns: int
    """Measured duration, on the device's clock (see `work_clock`)."""
    wall_ns: int
    """Real time that passed meanwhile."""
    probe_ns: int
    """The machine's probe right after it; 0 without one."""
    operators: dict[str, int]
    """Nanoseconds per operator, where they were recorded."""
    requests: tuple[tuple[int, int], ...]
    """(request uid, tokens) in schedule order: the decision it carried out."""


class WallClock:
    """Ties virtual time to real time: waits for arrivals, and counts what lies between steps."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        """`now_ns` tells the virtual time."""
        self._now_ns = now_ns
        self._origin: int | None = None

    def begin(self) -> int:
        """Wait until real time reaches the virtual time; the latter."""
        now = self._now_ns()
        if self._origin is None:
            self._origin = time.perf_counter_ns() - now
        behind = now - (time.perf_counter_ns() - self._origin)
        if behind > 0:
            time.sleep(behind / 1e9)
        return now

    def since(self, virtual_ns: int) -> int:
        """Real nanoseconds after a virtual instant, at least 1."""
        if self._origin is None:
            raise ValueError("the clock has not begun")
        return max(1, time.perf_counter_ns() - self._origin - virtual_ns)


@dataclass
class RealExecutor:
    """Implements `sim.engine.executor.Executor` with a decoder.

    With `clock` None time is virtual: a step lasts as long as executing it took, and nothing else
    takes time. `steps` keeps what was measured. Raises OutOfMemory, saying what did not fit.
    """

    runner: ModelRunner
    config: EngineConfig
    recorder: StepRecorder | None = None
    probe: Callable[[], int] | None = None
    """Called after every step; returns nanoseconds. Its time is not part of any step."""
    clock: WallClock | None = None
    steps: list[MeasuredStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._work_ns = work_clock(self.runner.decoder.weights.device)
        if self.config.pipeline_parallel_size > 1 or self.config.tensor_parallel_size > 1:
            raise UserError(
                "the real engine runs on one device: set tensor_parallel_size and "
                "pipeline_parallel_size to 1"
            )

    def execute(self, plan: StepPlan, shape: StepShape) -> StepOutcome:
        began = self.clock.begin() if self.clock is not None else 0
        collecting = gc.isenabled()
        gc.disable()  # a collection in the middle of a step would be counted as work
        try:
            wall, start = time.perf_counter_ns(), self._work_ns()
            recorder: StepRecorder | None = self.recorder
            if recorder is not None:
                recorder.start()
            result = self.runner.run(plan, recorder or NoRecorder())
            self._synchronise()
            measured = self._work_ns() - start
            wall = time.perf_counter_ns() - wall
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            raise self._out_of_memory(shape) from error
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            raise self._out_of_memory(shape) from error
        finally:
            if collecting:
                gc.enable()
        operators = recorder.finish() if recorder is not None else {}
        decision = tuple(
            (s.request.uid, n) for s, n in zip(plan.seqs, plan.num_tokens, strict=True)
        )
        self.runner.forget_finished()
        ns = measured if self.clock is None else self.clock.since(began)
        probe = self.probe() if self.probe is not None else 0
        self.steps.append(MeasuredStep(shape, ns, wall, probe, operators, decision))
        proposes = self.config.speculative and not self.config.async_scheduling
        return StepOutcome(
            (ns,), [len(new) for new in result.new], result.num_drafts if proposes else None
        )

    def _synchronise(self) -> None:
        device = self.runner.decoder.weights.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _out_of_memory(self, shape: StepShape) -> OutOfMemory:
        decoder = self.runner.decoder
        cache = sum(c.k.nbytes + c.v.nbytes for c in decoder.cache)
        weights = decoder.arch.shape.num_params * decoder.weights.embedding.element_size()
        return OutOfMemory(
            f"out of memory on {decoder.weights.device} in step {len(self.steps)}: weights "
            f"{weights / 1e9:.2f} GB and KV cache {cache / 1e9:.2f} GB fit, a step of "
            f"{shape.num_tokens} tokens in {shape.num_decodes + len(shape.prefills)} requests did "
            f"not; set a smaller max_num_batched_tokens or num_gpu_blocks"
        )
