"""vLLM V0's scheduler: continuous batching, whole prompts first."""

from __future__ import annotations

from dataclasses import dataclass

from sim.protocols import SchedulingPolicy


@dataclass
class Continuous(SchedulingPolicy):
    """Waiting prompts that fit run at once, alone in their step; decodes stall meanwhile.

    A prompt gets all its KV blocks at admission, which must leave 1 % of the blocks free; a
    decode that finds no block preempts the last request and recomputes it later.
    Source: Kwon et al., SOSP 2023, §4.5, and vLLM 0.6's default scheduler.
    """

    compose = "prefill-first"
    reserve = "prompt"
    chunked_prefill = False
    watermark: float | None = 0.01
