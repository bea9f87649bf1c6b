"""`simulate --execute`: the real engine in the place of the modelled executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from calibrate.engine.architecture import Architecture, architecture
from calibrate.engine.clock import work_clock
from calibrate.engine.device import pick_device
from calibrate.engine.executor import MeasuredStep, RealExecutor, WallClock
from calibrate.engine.llm import load_weights_of, make_runner
from calibrate.engine.tokens import TraceTokens
from calibrate.engine.weights import Weights
from calibrate.measure.machine import device_name
from calibrate.measure.recorder import recorder_for
from calibrate.measure.step_fit import operators_us
from sim.cost.interface import CostModel, FloatArray, IntArray, StepShape, StepShapes
from sim.engine.config import EngineConfig
from sim.engine.executor import Executor
from sim.errors import UserError


class Execution:
    """The weights of a model on a device, and an executor for each replica of a simulation.

    Replicas share the device and the weights; each has its own KV cache, and its steps are timed
    alone, as if it had a device to itself.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        cost: CostModel,
        *,
        device: str = "auto",
        dtype: str = "bf16",
        draft_model: str | None = None,
        seed: int = 0,
        now_ns: Callable[[], int] | None = None,
    ) -> None:
        """`device` `auto` is the GPU when there is one, else the CPU. `now_ns`, the simulation's
        clock, makes it run in real time. UserError for what does not fit or is not there."""
        self.device = _auto() if device == "auto" else pick_device(device)
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        self.config = config
        self.arch, self.weights = load_weights_of(
            model, architecture(model), device=self.device, dtype=dtype, seed=seed
        )
        self._draft: tuple[Architecture, Weights] | None = None
        if draft_model is not None:
            self._draft = load_weights_of(
                draft_model, architecture(draft_model), device=self.device, dtype=dtype, seed=seed
            )
            if self._draft[0].shape.vocab != self.arch.shape.vocab:
                raise UserError(
                    f"the draft model {draft_model} has another vocabulary than {model} "
                    f"({self._draft[0].shape.vocab} and {self.arch.shape.vocab} tokens)"
                )
        self._clock = None if now_ns is None else WallClock(now_ns)
        self._seed = seed
        self._executors: list[RealExecutor] = []
        about = f"executed on {device_name(self.device)} by the real engine, {dtype}"
        self.cost: CostModel = ExecutedCost(cost, self._executors, about)

    def executor(self, replica: int) -> Executor:
        """A new executor, with an empty KV cache."""
        tokens = TraceTokens(self.arch.shape.vocab, self._seed)
        runner = make_runner(self.arch, self.weights, self.config, tokens, draft=self._draft)
        recorder = recorder_for(self.device, work_clock(self.device))
        executor = RealExecutor(runner, self.config, recorder=recorder, clock=self._clock)
        self._executors.append(executor)
        return executor


def _auto() -> torch.device:
    return pick_device("cuda" if torch.cuda.is_available() else "cpu")


class ExecutedCost:
    """What metrics ask a cost model, answered from executed steps where they are meant.

    Durations of steps that were not executed (the capacity estimate asks) come from the cost model
    of the simulation, and so do the delays around the engine.
    """

    def __init__(self, inner: CostModel, executors: Sequence[RealExecutor], about: str) -> None:
        self._inner = inner
        self._executors = executors
        self._about = about

    def step_ns(self, shape: StepShape) -> int:
        return self._inner.step_ns(shape)

    def decode_run_ns(
        self, num_decodes: int, decode_context: int, decode_context_sq: int, n: int
    ) -> IntArray:
        return self._inner.decode_run_ns(num_decodes, decode_context, decode_context_sq, n)

    def parts_s(self, shapes: StepShapes) -> dict[str, FloatArray]:
        steps = self._steps_of(shapes)
        if steps is None:
            return self._inner.parts_s(shapes)
        us = operators_us(steps)
        return {
            "attention": (us["attention_decode"] + us["attention_prefill"]) * 1e-6,
            "linear": (us["linear"] + us["head"]) * 1e-6,
            "moe": us["moe"] * 1e-6,
            "communication": np.zeros(len(steps)),
            "host": us["host"] * 1e-6,
        }

    def _steps_of(self, shapes: StepShapes) -> list[MeasuredStep] | None:
        """The executed steps that a log is about: those of the replica with the same token counts
        (the last planned ones may be missing from the log)."""
        count = len(shapes.num_tokens)
        for executor in self._executors:
            steps = executor.steps[:count]
            if [s.shape.num_tokens for s in steps] == shapes.num_tokens.tolist():
                return steps
        return None

    def arrival_ns(self, prompt_tokens: int) -> int:
        return self._inner.arrival_ns(prompt_tokens)

    def delivery_ns(self, num_running: int) -> int:
        return self._inner.delivery_ns(num_running)

    def describe(self) -> dict[str, Any]:
        return {
            **self._inner.describe(),
            "profile": "measured",
            "provenance": self._about,
            "extrapolated_fraction": 0.0,
        }
