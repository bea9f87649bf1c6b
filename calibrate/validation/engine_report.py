"""What `validate engine` tells a person."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from calibrate.validation.engine_loop import Loops

AIMS = {"step_median": 0.10, "tpot_mean": 0.07, "ttft_mean": 0.10}
NAMES = {
    "step_median": "step, median",
    "tpot_mean": "TPOT, mean",
    "ttft_mean": "TTFT, mean",
    "e2e_mean": "E2E, mean",
}


def print_report(loops: Loops, console: Console | None = None) -> None:
    console = console or Console()
    middle = loops.median
    scale = loops.trace["rate_scale"]
    console.print(
        f"{loops.model} on {loops.device['device']}, {loops.trace['requests']} requests of "
        f"{loops.trace['name']} at {scale:.3g} times its rate, {loops.clock} clock, "
        f"{len(loops.comparisons)} run(s)"
    )
    same = "equal" if all(c.decisions_equal for c in loops.comparisons) else "DIFFERENT"
    console.print(
        f"decisions, given the measured durations: {same} "
        f"({middle.executed['steps']:.0f} steps executed, "
        f"{middle.simulated['steps']:.0f} simulated)"
    )
    raw, normalised = loops.errors("raw"), loops.errors("normalised")
    table = Table(title="error of the simulation (median over the runs)")
    for name in ("", "executed", "simulated", "raw", "normalised", "aim"):
        table.add_column(name, justify="right" if name else "left")
    for key, title in NAMES.items():
        column = key.replace("_mean", "_s")
        seen = middle.executed.get(column), middle.simulated.get(column)
        table.add_row(
            title,
            *("" if v is None else f"{1e3 * v:.2f} ms" for v in seen),
            _percent(raw, key),
            _percent(normalised, key),
            f"{AIMS[key]:.0%}" if key in AIMS else "",
        )
    console.print(table)
    _print_parts(loops, console)
    noise = middle.noise
    console.print(
        f"the machine: equal steps spread {noise.step:.1%}, probe spread {noise.probe:.0%}, "
        f"drift against the calibration {noise.drift:.2f}x, "
        f"{noise.interrupted:.0%} of the time interrupted by others"
    )
    if middle.failure:
        console.print(f"ended early: {middle.failure}")


def _print_parts(loops: Loops, console: Console) -> None:
    middle = loops.median
    table = Table(title="errors by kind of step and by operator, normalised")
    for name in ("", "steps", "median", "p90", "bias", "share of time"):
        table.add_column(name, justify="right" if name else "left")
    for kind, e in middle.kinds.items():
        table.add_row(f"{kind} steps", str(e.steps), *map(_pc, (e.median, e.p90, e.bias)), "")
    for name, o in middle.operators.items():
        if name != "step":
            table.add_row(name, str(o.steps), *map(_pc, (o.median, o.p90, o.bias, o.share)))
    console.print(table)


def _percent(errors: dict[str, float] | None, key: str) -> str:
    if errors is None:
        return "-"
    return _pc(errors.get(f"{key}_signed", errors[key]))


def _pc(value: float) -> str:
    return f"{100 * value:.1f} %"
