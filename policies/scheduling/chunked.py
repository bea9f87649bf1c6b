"""vLLM V1's default scheduler: chunked prefills mixed with decodes under one token budget."""

from __future__ import annotations

from dataclasses import dataclass

from sim.protocols import SchedulingPolicy


@dataclass
class Chunked(SchedulingPolicy):
    """Decodes are never stalled by a whole prompt: a long one is spread over steps.

    Sources: vLLM 0.33.0 `v1/core/sched/scheduler.py`; the idea is Sarathi-Serve (Agrawal et al.,
    OSDI 2024). It is what `SchedulingPolicy` declares by default.
    """
