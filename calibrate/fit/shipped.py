"""Make the profiles that are shipped in `sim/cost/profiles` from published kernel timings.

    python -m calibrate.fit.shipped FOLDER [GPU ...]

`FOLDER` holds the tables of published timings (gemm.csv.gz, attn_prefill.csv.gz, ...; see
`calibrate.fit.points` for the columns). What is written are coefficients and smoothed residuals,
and for GPUs that nobody timed whose entries they have (`sim.cost.derived`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from calibrate.fit.inputs import read_gpu
from calibrate.fit.points import Points, of_gpu, read_points
from calibrate.fit.profile import fit_profile
from sim.cost.hardware import aliases, catalogue
from sim.cost.profile import derive, save

FILES = (
    "gemm",
    "attn_prefill",
    "attn_decode",
    "moe",
    "allreduce",
    "collectives_other",
    "elementwise",
)
GPUS = (
    "A100-80G",
    "H100-SXM",
    "L40S",
    "B200-SXM",
    "RTX-4090",
    "RTX-PRO-6000",
    "RTX-PRO-6000-SE",
)
SOURCES = {
    "aic": "ai-dynamo/aiconfigurator 095f58a (Apache-2.0)",
    "vidur": "microsoft/vidur 7d47513 (MIT)",
    "lls": "casys-kaist/LLMServingSim 5daddb2 (MIT)",
    "infersim": "alibaba/InferSim f2293da (Apache-2.0)",
}
"""Who measured, by the `source` column."""
TARGET = Path(__file__).resolve().parents[2] / "sim" / "cost" / "profiles"


def main(argv: Sequence[str]) -> int:
    folder, names = Path(argv[0]), argv[1:] or (*GPUS, *derived_gpus())
    tables = [read_points(folder / f"{name}.csv.gz") for name in FILES]
    for name in names:
        card = read_gpu(name, None)
        if card.name in derived_gpus():
            save(derive(card), TARGET / f"{card.name}.json", by_reference=True)
            continue
        mine = [p for p in (of_gpu(t, aliases(card)) for t in tables) if len(p.table)]
        profile = fit_profile(
            mine,
            card,
            provenance=f"fitted on published kernel timings ({_cited(mine)})",
            created="2026-11-29",
            meta={"sources": SOURCES, "date_of_points": "as published; not measured here"},
        )
        entries = tuple(
            replace(e, provenance="fitted on published timings") for e in profile.entries
        )
        path = TARGET / f"{card.name}.json.gz"
        save(replace(profile, entries=entries), path)
        print(
            f"{path.name}: {len(entries)} operators, {path.stat().st_size // 1024} KB", flush=True
        )
    return 0


def derived_gpus() -> list[str]:
    """Built-in GPUs without timings."""
    return [name for name in catalogue() if name not in GPUS]


def _cited(points: Sequence[Points]) -> str:
    """The sources of the points, as text."""
    found = {
        "lls" if s.startswith("lls") else s
        for p in points
        if "source" in p.table
        for s in p.table["source"].astype(str).unique()
    }
    return "; ".join(SOURCES.get(s, s) for s in sorted(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
