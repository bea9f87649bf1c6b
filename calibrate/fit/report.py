"""`calibrate report`: fit and hold-out errors per operator, and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.fit.holdout import Test, coarse_test, floor_test, unseen_test
from calibrate.fit.points import Points
from calibrate.fit.profile import Group, fit_group, groups
from sim.cost.hardware import Gpu
from sim.cost.operators import FORMS
from sim.cost.predictor import describe

HEADER = f"{'operator':60s} {'points':>7s} {'fit':>11s} {'coarse':>11s} {'unseen':>11s}"


def report(
    points: Sequence[Points], gpu: Gpu, out: Path | None, *, floor: bool = False
) -> list[Test]:
    """Print one line per operator and key (errors in per cent, median/p90: of the fit on all
    points, of a coarse calibration on the other points, on matrix shapes left out) and a summary
    per operator; draw plots into `out`. `floor` adds what stays when nearly all points are known.
    Returns the hold-out tests."""
    print(HEADER + (f" {'floor':>11s}" if floor else ""))
    tests: list[Test] = []
    for group in groups(points):
        coarse, unseen = coarse_test(group, gpu), unseen_test(group, gpu)
        entry = fit_group(group, gpu)
        fit = (entry.error["median"], entry.error["p90"])
        cells = [fit, coarse.error if coarse else None, unseen.error if unseen else None]
        lowest = floor_test(group, gpu) if floor else None
        if floor:
            cells.append(lowest.error if lowest else None)
        name = describe(entry)[:60]
        print(f"{name:60s} {len(group):7d} " + " ".join(_cell(c) for c in cells), flush=True)
        tests += [t for t in (coarse, unseen, lowest) if t is not None]
    _summary(tests)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        _plot_errors(tests, gpu, out)
        _plot_rooflines([t.group for t in tests if t.kind == "coarse"], gpu, out)
    return tests


def _cell(error: tuple[float, float] | None) -> str:
    return f"{error[0]:5.1f}/{error[1]:5.1f}" if error else " " * 8 + "-  "


def _summary(tests: Sequence[Test]) -> None:
    for kind in ("coarse", "unseen shapes", "floor"):
        for op in FORMS:
            off = [
                100 * np.abs(t.predicted / t.measured - 1)
                for t in tests
                if t.kind == kind and t.group.op == op
            ]
            if off:
                all_of = np.concatenate(off)
                print(
                    f"{op}, {kind}: {len(all_of)} points, "
                    f"{np.median(all_of):.1f} % median, {np.percentile(all_of, 90):.1f} % p90"
                )


def _plot_errors(tests: Sequence[Test], gpu: Gpu, out: Path) -> None:
    """Measured against predicted, one panel per operator, hold-out points only."""
    plt = _pyplot()
    ops = [op for op in FORMS if any(t.group.op == op for t in tests)]
    figure, panels = plt.subplots(1, len(ops), figsize=(4.2 * len(ops), 4), squeeze=False)
    for panel, op in zip(panels[0], ops, strict=True):
        for test in (t for t in tests if t.group.op == op and t.kind == "coarse"):
            panel.loglog(test.measured, test.predicted, ".", markersize=2, alpha=0.4)
        low, high = panel.get_xlim()
        panel.plot([low, high], [low, high], "k-", linewidth=0.8)
        panel.set(title=f"{op}, {gpu.name}", xlabel="measured, us", ylabel="predicted, us")
    figure.tight_layout()
    figure.savefig(out / "measured_vs_predicted.svg")
    plt.close(figure)


def _plot_rooflines(found: Sequence[Group], gpu: Gpu, out: Path) -> None:
    """Matrix products under the GPU's roofline, per dtype."""
    gemms = [g for g in found if g.op == "gemm"]
    if not gemms:
        return
    plt = _pyplot()
    figure, panel = plt.subplots(figsize=(6, 4.5))
    intensity = np.logspace(0, 4, 100)
    for group in gemms:
        dtype = str(group.key.get("dtype", "bf16"))
        work = FORMS["gemm"].work(group.columns, gpu, {"dtype": dtype}, {})
        points = work["flops"] / work["bytes"]
        dots = panel.loglog(points, work["flops"] / group.us / 1e6, ".", markersize=2, alpha=0.4)
        roof = np.minimum(gpu.peak_flops(dtype), intensity * gpu.bytes_per_s) / 1e12
        name = " ".join(str(v) for v in group.key.values())
        panel.loglog(intensity, roof, "-", color=dots[0].get_color(), label=name)
    panel.set(xlabel="FLOP per byte", ylabel="TFLOP/s", title=f"Matrix products, {gpu.name}")
    panel.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(out / "roofline.svg")
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
