"""A fixed piece of work, timed again and again, that shows how fast the machine is just now.

Memory bandwidth and clock are shared with whatever else runs; the same step then takes 1.1 to 10
times as long. The work resembles a small step: a matrix product, a gather of cached blocks, a norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from calibrate.engine.clock import work_clock

FloatArray = npt.NDArray[np.float64]


class Probe:
    """About half a millisecond of work on a CPU core."""

    def __init__(self, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.device = torch.device(device)
        self._clock = work_clock(self.device)
        generator = torch.Generator().manual_seed(seed)

        def make(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(self.device, dtype)

        self._x = make(4, 512)
        self._weights = [make(1024, 512) for _ in range(4)]
        self._blocks = make(512, 16, 4, 64)
        self._table = torch.randint(0, 512, (64,), generator=generator).to(self.device)
        self._norm = make(512)
        for _ in range(20):
            self._work()

    def _work(self) -> None:
        for weight in self._weights:
            F.linear(self._x, weight)
            F.rms_norm(self._x, (512,), self._norm)
            self._blocks.index_select(0, self._table)

    @torch.inference_mode()
    def ns(self) -> int:
        """Time of the work now, nanoseconds: the faster of two tries, which leaves out most
        interruptions of the probe itself."""
        tries = []
        for _ in range(2):
            self._wait()
            start = self._clock()
            self._work()
            self._wait()
            tries.append(self._clock() - start)
        return min(tries)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def slowness(
    probes_ns: Sequence[int] | FloatArray, reference_ns: float, width: int = 5
) -> FloatArray:
    """How many times slower than at the reference the machine was at each probe, smoothed by a
    running median over `width` probes (the probe has noise of its own)."""
    values = np.asarray(probes_ns, dtype=np.float64) / reference_ns
    if len(values) == 0:
        return values
    half = width // 2
    padded = np.pad(values, half, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    smooth: FloatArray = np.median(windows, axis=1)
    return smooth
