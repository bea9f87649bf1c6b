"""The report of a GPU check, as a short Markdown page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calibrate.checks.attention import Check
from sim.cost.profile import Profile


class Report:
    """Collects what was found; `write` may be called after every part."""

    def __init__(self, machine: Mapping[str, Any], path: Path) -> None:
        self.path = path
        self.passed = True
        self._machine = machine
        self._sections: list[str] = []
        self._times: list[str] = []

    def add_tests(self, passed: bool, summary: str) -> None:
        self.passed &= passed
        self._sections.append(f"## Kernel tests on the device\n\n{summary}\n")

    def peaks(self, peaks: Mapping[str, Any]) -> None:
        noisy = f" (NOISY: {peaks['noisy']})" if peaks["noisy"] else ""
        self._sections.append(
            f"## Kernels\n\nMeasured in this run: copy {peaks['copy_gb_s']:.0f} GB/s, bf16 product "
            f"{peaks['product_tflops']:.1f} TFLOP/s{noisy}.\n"
        )

    def add_checks(self, checks: Sequence[Check]) -> None:
        lines = ["| check | reached | aim | | measured |", "|---|---|---|---|---|"]
        for c in checks:
            value = "" if c.value is None else f"{c.value:.2f}"
            aim = "" if c.aim is None else f"{c.aim:.2f}"
            lines.append(f"| {c.name} | {value} | {aim} | {c.verdict} | {c.detail} |")
        self._sections.append("\n".join(lines) + "\n")

    def add_profile(self, model: str, profile: Profile, path: Path) -> None:
        lines = [f"## Calibration for {model}\n", f"`{path.name}`, {profile.provenance}. "
                 f"{profile.meta['noisy_points']} noisy points, {profile.meta['took_s']} s.\n",
                 "| operator | kernel | points | held-out median % | p90 % |",
                 "|---|---|---|---|---|"]  # fmt: skip
        for e in profile.entries:
            if "holdout_median" in e.error:
                kernel = e.key.get("kernel", e.key.get("model", ""))
                lines.append(f"| {e.op} | {kernel} | {e.points} | {e.error['holdout_median']:.1f} "
                             f"| {e.error['holdout_p90']:.1f} |")  # fmt: skip
        self._sections.append("\n".join(lines) + "\n")

    def add_validation(self, found: Mapping[str, Any]) -> None:
        same = "equal" if found["decisions_equal"] else "DIFFERENT"
        self.passed &= bool(found["decisions_equal"])
        trace = found["trace"]
        lines = [
            "## validate engine\n",
            f"{found['model']}, {trace['requests']} requests of {trace['name']} at "
            f"{trace['rate_scale']:.3g} times its rate. Decisions: {same}.\n",
            "| error | raw | normalised | aim |",
            "|---|---|---|---|",
        ]
        aims = {"step_median": 0.10, "tpot_mean": 0.07, "ttft_mean": 0.10}
        for name, aim in aims.items():
            raw, normal = found["raw"], found["normalised"]
            other = "" if normal is None else f"{100 * normal[name]:.1f} %"
            lines.append(f"| {name} | {100 * raw[name]:.1f} % | {other} | {100 * aim:.0f} % |")
        noise = ", ".join(f"{k} {v:.3f}" for k, v in found["noise"].items())
        lines.append(f"\nNoise: {noise}.")
        self._sections.append("\n".join(lines) + "\n")

    def skip(self, title: str) -> None:
        self._sections.append(f"## {title}\n\nLeft out.\n")

    def fail(self, title: str, error: Exception) -> None:
        self.passed = False
        first = str(error).splitlines()[0] if str(error) else ""
        self._sections.append(f"## {title}\n\nFAILED: {type(error).__name__}: {first}\n")

    def took(self, title: str, seconds: float) -> None:
        self._times.append(f"{title} {seconds:.0f} s")

    def write(self) -> None:
        m = self._machine
        versions = f"torch {m['torch']}, triton {m['triton']}, driver {m.get('driver_version')}"
        head = (
            f"# Check of {m['device']}, {m['date']}\n\n{versions}, clocks "
            f"{m.get('clocks_sm')}/{m.get('clocks_mem')} MHz. {'; '.join(self._times)}.\n"
        )
        self.path.write_text("\n".join([head, *self._sections]), encoding="utf-8")
