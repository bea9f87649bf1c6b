"""FasterTransformer's scheduler: one batch at a time."""

from __future__ import annotations

from dataclasses import dataclass

from sim.protocols import Reserve, SchedulingPolicy


@dataclass
class Static(SchedulingPolicy):
    """The earliest requests make a batch as large as memory allows; the next batch starts when
    its slowest request has finished.

    Every request reserves contiguous KV memory for the longest sequence the engine accepts
    (`engine.max_model_len`), whatever its own length; `reserve=declared` takes the client's
    `max_tokens` instead.
    Source: the FasterTransformer baseline of Orca (Yu et al., OSDI 2022, §6.2) and of
    PagedAttention (Kwon et al., SOSP 2023, §6.1).
    """

    compose = "whole-batch"
    layout = "contiguous"
    chunked_prefill = False
    reserve: Reserve = "max"
