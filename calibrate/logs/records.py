"""What a server's logs say, in columns: durations of steps, or latencies of requests."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sim.cost.interface import StepShapes

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
LATENCIES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class Steps:
    """Steps of one run of one engine, in the order of the log."""

    name: str
    format: str
    shapes: StepShapes
    duration_s: FloatArray
    """From the end of the step before, when the engine was busy, to the step's own end."""
    counts: dict[str, int] = field(default_factory=dict)
    """What the reader did: rows read, skipped, ..."""
    notes: tuple[str, ...] = ()
    """What was assumed where the log is silent."""

    def __len__(self) -> int:
        return len(self.duration_s)


@dataclass(frozen=True)
class Requests:
    """Requests of one run of one client, by the time at which they were (to be) sent."""

    name: str
    format: str
    sent_s: FloatArray
    """From the first. In a closed loop, where a request also waits for a free slot: the earliest
    time at which the client wanted to send it."""
    prompt_tokens: IntArray
    output_tokens: IntArray
    ttft_s: FloatArray
    """NaN where not recorded; so are the other two."""
    tpot_s: FloatArray
    e2e_s: FloatArray
    content: IntArray | None = None
    """Equal numbers are equal prompts; None: all differ."""
    max_in_flight: int | None = None
    """Slots of a closed loop; None: an open loop."""
    counts: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.sent_s)

    def latency(self, name: str) -> FloatArray:
        found: FloatArray = getattr(self, f"{name}_s")
        return found


Records = Steps | Requests
