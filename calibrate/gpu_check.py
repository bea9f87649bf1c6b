"""`python -m calibrate.gpu_check`: everything that only a GPU can show, in one run.

Kernel tests on the device, what the kernels reach of the chip and against torch's, a calibration
for two models, and `validate engine` on a slice of a trace. Writes the profiles and a Markdown
table into a folder. Needs at most 8 minutes on one H200.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import UserError

if TYPE_CHECKING:
    import torch

    from calibrate.checks.attention import Check, Sizes

ROOT = Path(__file__).resolve().parent.parent
AZURE = ROOT.parent / "shared" / "traces" / "AzureLLMInferenceTrace_conv.csv"


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything ran and the kernel tests passed, 1 when not, 2 for a user's mistake."""
    try:
        return _run(_parser().parse_args(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda (default); cpu tries the code only")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder (gpu_check)")
    parser.add_argument("--budget", default="90s", help="per calibrated model (90s)")
    parser.add_argument(
        "--models", default="", help="calibrated (Llama-3-8B,Qwen3-30B-A3B; on a CPU small)"
    )
    parser.add_argument("--trace", type=Path, help="for validate engine (default: an Azure trace)")
    parser.add_argument("--limit", type=int, default=150, help="its first N requests (150)")
    parser.add_argument("--skip", default="", help="parts to leave out: tests,kernels,run,validate")
    return parser


def _run(args: argparse.Namespace) -> int:
    skipped = {part for part in args.skip.split(",") if part}
    for part in skipped - {"tests", "kernels", "run", "validate"}:
        raise UserError(f"--skip knows tests, kernels, run and validate, not {part!r}")
    try:
        from calibrate.checks.markdown import Report
        from calibrate.engine.device import pick_device
        from calibrate.measure.machine import describe_machine
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        raise UserError(
            f"gpu_check needs {error.name}: pip install 'tokentwin[kernels]'"
        ) from error
    device = pick_device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    report = Report(describe_machine(device), args.out / "gpu_check.md")
    models = args.models or ("small" if device.type == "cpu" else "Llama-3-8B,Qwen3-30B-A3B")
    names = [name.strip() for name in models.split(",")]
    parts: list[tuple[str, str, Callable[[], None]]] = [
        ("tests", "kernel tests", lambda: _tests(report, device)),
        ("kernels", "kernels", lambda: report.add_checks(_kernel_checks(device, report))),
    ]
    for name in names:
        parts.append(("run", f"calibrate {name}", partial(_calibrate, args, name, report)))
    parts.append(("validate", "validate engine", lambda: _validate(args, names[0], report)))
    for part, title, work in parts:
        if part in skipped:
            report.skip(title)
            continue
        print(f"{title} ...", file=sys.stderr, flush=True)
        begin = time.monotonic()
        try:
            work()
        except Exception as error:
            # One part that fails must not lose what the others found on a machine that costs money.
            report.fail(title, error)
        report.took(title, time.monotonic() - begin)
        report.write()
    report.write()
    print(report.path.read_text(encoding="utf-8"))
    return 0 if report.passed else 1


def _tests(report: Any, device: torch.device) -> None:
    """The kernels' own tests, in another process: it decides on its own where kernels run."""
    marks = ["-m", "gpu"] if device.type == "cuda" else ["-k", "layer"]
    # Compiling takes most of the time, and several processes can do it.
    workers = ["-n", "8"] if device.type == "cuda" and find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider",
               *workers, *marks, "tests/kernels", "tests/timing"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    last = [line for line in done.stdout.splitlines() if line.strip()][-1:]
    report.add_tests(done.returncode == 0, last[0] if last else done.stderr.strip()[-300:])
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)


def _kernel_checks(device: torch.device, report: Any) -> list[Check]:
    from calibrate.checks import attention, moe
    from calibrate.measure.bench import Bench, measured_peaks

    sizes: Sizes = attention.GPU_SIZES if device.type == "cuda" else attention.CPU_SIZES
    peaks = measured_peaks(device)
    report.peaks(peaks)
    bench = Bench(device)
    copy, product = peaks["copy_gb_s"], peaks["product_tflops"]
    return [
        *attention.decode_checks(bench, sizes, copy),
        *attention.prefill_checks(bench, sizes, product),
        *attention.decode_against_torch(bench, sizes),
        *attention.growth_checks(bench, sizes),
        *moe.moe_checks(bench, sizes, product),
    ]


def _calibrate(args: argparse.Namespace, model: str, report: Any) -> None:
    from calibrate.measure.campaign import run_campaign

    profile = args.out / f"{model.lower()}.json.gz"
    options = argparse.Namespace(
        device=args.device, model=model, tp=1, budget=args.budget, dtype="bf16", out=profile,
        csv=None, gpu=None, no_engine=False, seed=0,
    )  # fmt: skip
    report.add_profile(model, run_campaign(options), profile)


def _validate(args: argparse.Namespace, model: str, report: Any) -> None:
    import traces
    from calibrate.validation.engine import document
    from calibrate.validation.engine_loop import run_loops

    profile = args.out / f"{model.lower()}.json.gz"
    trace = args.trace or (AZURE if AZURE.is_file() else traces.sample_path())
    options = argparse.Namespace(
        device=args.device, model=model, trace=trace, limit=args.limit, rate_scale=None, load=0.5,
        profile=profile if profile.is_file() else None, budget="30s", dtype="bf16",
        wall_clock=False, runs=1, seed=0, set=[], out=None, json=True,
    )  # fmt: skip
    report.add_validation(document(run_loops(options)))


if __name__ == "__main__":
    sys.exit(main())
