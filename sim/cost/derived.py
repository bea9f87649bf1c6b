"""Profiles of GPUs that nobody timed: the kernels of the nearest relative on their own datasheet.

A profile holds fractions of the datasheet's peaks and what is left over (residuals), so that a
relative's entries become another GPU's by reading them against its datasheet: nothing in them is
changed. The files in `sim/cost/profiles` that end in `.json` say so for every built-in GPU without
timings of its own; `calibrate.fit.shipped` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sim.cost.hardware import Gpu

RELATIVES: Mapping[str, str] = {
    "volta": "A100-80G",
    "ampere": "A100-80G",
    "ada": "L40S",
    "hopper": "H100-SXM",
    "blackwell": "B200-SXM",
    "blackwell-consumer": "RTX-PRO-6000-SE",
    "cdna3": "H100-SXM",
    "unknown": "A100-80G",
}
"""Whose kernels a GPU without a profile of its own is assumed to run, by architecture."""
GDDR_GAIN = 1.15
"""Share of the datasheet bandwidth that products reach on GDDR memory, over that on HBM (L40S 0.75,
RTX 4090 and PRO 6000 0.76 to 0.86; A100 0.66, H100 0.71), for cards that borrow from the latter."""
SCALING = {
    "bf16": "compute-bound time of 16-bit products and attention",
    "fp8": "compute-bound time of fp8 products",
    "int8": "compute-bound time of int8 products",
    "fp4": "compute-bound time of 4-bit products",
    "bandwidth": "memory-bound time of every operator",
    "l2_mb": "how much KV the L2 cache holds",
    "sms": "waves of attention blocks",
    "nvlink": "collectives, bytes per link (none: over PCIe)",
    "pcie": "collectives without NVLink, offloading",
}
"""The datasheet's fields that operators read, and what each one scales."""


def relative_of(card: Gpu) -> str:
    return RELATIVES.get(card.arch, RELATIVES["unknown"])


def gains_from_gddr(card: Gpu, relative: Gpu) -> bool:
    """Whether `GDDR_GAIN` applies to the bandwidth of a card with the relative's efficiencies."""
    return card.gddr and not relative.gddr


def provenance(card: Gpu, relative: Gpu, known: str) -> str:
    """What a derived profile is, in a sentence; `known` is the relative's own provenance."""
    gain = f" (GDDR memory: x {GDDR_GAIN:g})" if gains_from_gddr(card, relative) else ""
    kin = relative.name if card.arch == relative.arch else f"{relative.name} (another architecture)"
    return (
        f"derived, nothing was timed on {card.name}: efficiencies and residuals of {kin}, {known}; "
        f"peaks and bandwidths of the datasheet of {card.name}"
        f"{gain} ({card.source or 'source not stated'})"
    )


def scaled(card: Gpu, relative: Gpu) -> dict[str, Any]:
    """By datasheet field in which the two differ: `from` (relative), `to` (this GPU), `scales`.
    With the share of the bandwidth that GDDR reaches over HBM, where that applies."""
    found: dict[str, Any] = {}
    for name, what in SCALING.items():
        old, new = getattr(relative, name), getattr(card, name)
        if old != new:
            found[name] = {"from": old, "to": new, "scales": what}
    if gains_from_gddr(card, relative):
        found["gddr_gain"] = {"from": 1.0, "to": GDDR_GAIN, "scales": "bandwidth reached"}
    return found


def datasheet(card: Gpu) -> dict[str, Any]:
    """The fields of a GPU, as `hardware.gpu_from_datasheet` reads them."""
    return {name: value for name, value in asdict(card).items() if name != "price"}
