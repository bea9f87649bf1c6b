"""The first requests of a freshly started mixture-of-experts server.

vLLM runs unquantised experts in Triton, with a kernel configuration per bucket of tokens.
The buckets of decode batches are compiled while CUDA graphs are captured; those of prefills on
first use, while everybody waits. In the per-request data of the open Mixtral runs the server
stands still for 1 to 2 seconds three to five times within the first ten seconds; in the stages of
the others the 99th percentile of TTFT shows it, and the fewer buckets `max_num_batched_tokens`
leaves the less.
"""

from __future__ import annotations

from typing import Any

from sim.cost.interface import CostModel, FloatArray, IntArray, StepShape, StepShapes

BUCKETS = (512, 1024, 1536, 2048, 3072, 4096)
"""Token counts of the configurations that serve prefills (`fused_moe/configs`)."""
CAPTURED = 256
"""Steps of so many tokens or fewer run in CUDA graphs, whose kernels exist."""
COMPILE_NS = 1_500_000_000
"""Per bucket: up and down projection, compiled on all GPUs at a time."""


class ColdExperts:
    """A cost model whose first step in each bucket also compiles. Remembers what it has compiled:
    one object serves one server's run, and unlike other cost models it is not a pure function."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._compiled: set[int] = set()

    def step_ns(self, shape: StepShape) -> int:
        plain, tokens = self._cost.step_ns(shape), shape.num_tokens
        if tokens <= CAPTURED:
            return plain
        bucket = min(BUCKETS, key=lambda size: abs(size - tokens))
        if bucket in self._compiled:
            return plain
        self._compiled.add(bucket)
        return plain + COMPILE_NS

    def decode_run_ns(
        self, num_decodes: int, decode_context: int, decode_context_sq: int, n: int
    ) -> IntArray:
        return self._cost.decode_run_ns(num_decodes, decode_context, decode_context_sq, n)

    def parts_s(self, shapes: StepShapes) -> dict[str, FloatArray]:
        return self._cost.parts_s(shapes)

    def arrival_ns(self, prompt_tokens: int) -> int:
        return self._cost.arrival_ns(prompt_tokens)

    def delivery_ns(self, num_running: int) -> int:
        return self._cost.delivery_ns(num_running)

    def describe(self) -> dict[str, Any]:
        return self._cost.describe()
