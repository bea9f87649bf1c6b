"""GPU datasheets: peaks, bandwidths, memory. The data is in `data/gpus.json`, with its sources."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from sim.errors import UserError, normalise, unknown

GIB = 1024**3


@dataclass(frozen=True)
class Gpu:
    """One GPU's datasheet. Peaks are dense; see `data/gpus.json` for the sources."""

    name: str
    arch: str
    """`ampere`, `ada`, `hopper`, `blackwell`, `blackwell-consumer`, ..."""
    sms: int
    bf16: float
    """Peak of fp16/bf16 products with fp32 accumulation, TFLOP/s."""
    fp8: float | None
    """TFLOP/s; None: no fp8 units (weights are dequantised to 16 bits)."""
    memory_gib: float
    """Device memory as the driver reports it, GiB."""
    bandwidth: float
    """Memory bandwidth, GB/s."""
    l2_mb: float
    nvlink: float | None
    """NVLink bandwidth of both directions together, GB/s; None: none (PCIe only)."""
    pcie: float
    """Host link, GB/s in one direction."""
    attention: str
    """The attention kernels vLLM picks on it: `fa2`, `fa3` or `flashinfer`."""
    gddr: bool = False
    """GDDR memory instead of HBM."""
    int8: float | None = None
    fp4: float | None = None
    watt: float | None = None
    price: float | None = None
    """USD per GPU and hour, list price."""
    source: str = ""

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s of a matrix product with operands of `dtype`; 16-bit peak where the GPU has no
        units for it (operands are converted)."""
        fp8 = self.fp8 if self.fp8 is not None else self.bf16
        tflops = {
            "fp8": fp8,
            "fp8_block": fp8,
            "int8": self.int8 if self.int8 is not None else self.bf16,
            "nvfp4": self.fp4 if self.fp4 is not None else self.bf16,
        }.get(dtype, self.bf16)
        return tflops * 1e12

    @property
    def bytes_per_s(self) -> float:
        return self.bandwidth * 1e9

    @property
    def link_bytes_per_s(self) -> float:
        """Bandwidth between two GPUs of one node, one direction, bytes/s."""
        return (self.nvlink / 2 if self.nvlink is not None else self.pcie) * 1e9


@cache
def catalogue() -> Mapping[str, Gpu]:
    """Every built-in GPU by its canonical name."""
    return {e["name"]: _from_entry(e) for e in _entries()}


def gpu(name: str) -> Gpu:
    """The built-in GPU of that name, or any of its aliases; case and punctuation do not matter,
    nor does a remark in brackets. Raises UserError naming the nearest match."""
    wanted = normalise(re.sub(r"\(.*?\)", "", name)).removeprefix("nvidia")
    found = _by_alias().get(wanted)
    if found is None:
        raise unknown("GPU", name, catalogue())
    return found


def aliases(card: Gpu) -> tuple[str, ...]:
    """The names of a GPU: its own and, when it is built in, all others."""
    known: list[str] = next((e["aliases"] for e in _entries() if e["name"] == card.name), [])
    return (card.name, *known)


def gpu_from_datasheet(entry: Mapping[str, Any], where: str) -> Gpu:
    """A GPU described by the user, with the keys of `data/gpus.json`; `sms`, `l2_mb` and links
    have neutral defaults. Raises UserError for a missing or wrong key, naming `where`."""
    defaults: dict[str, Any] = {
        "arch": "unknown",
        "sms": 108,
        "fp8": None,
        "l2_mb": 40,
        "nvlink": None,
        "pcie": 32,
        "attention": "fa2",
        "source": f"user ({where})",
    }
    known = {*Gpu.__dataclass_fields__, "aliases"}
    for key in entry:
        if key not in known:
            raise unknown(f"datasheet field in {where}", key, known)
    for key in ("name", "bf16", "memory_gib", "bandwidth"):
        if key not in entry:
            raise UserError(f"{where}: the datasheet needs {key!r} (see sim/cost/data/gpus.json)")
    return _from_entry({**defaults, **entry})


def _from_entry(entry: Mapping[str, Any]) -> Gpu:
    return Gpu(**{k: v for k, v in entry.items() if k != "aliases"})


@cache
def _entries() -> list[dict[str, Any]]:
    text = files("sim.cost").joinpath("data/gpus.json").read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = json.loads(text)["gpus"]
    return entries


@cache
def _by_alias() -> dict[str, Gpu]:
    by_name = catalogue()
    return {
        normalise(alias).removeprefix("nvidia"): by_name[e["name"]]
        for e in _entries()
        for alias in (e["name"], *e["aliases"])
    }
