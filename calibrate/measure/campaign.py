"""The work of `calibrate run`: everything that needs torch."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from calibrate.engine.architecture import Architecture, architecture
from calibrate.engine.device import free_bytes, pick_device
from calibrate.engine.llm import load_weights_of, make_runner
from calibrate.engine.memory import fill_blocks
from calibrate.engine.settings import engine_config
from calibrate.engine.threads import one_thread
from calibrate.engine.tokens import TraceTokens
from calibrate.engine.weights import DTYPES
from calibrate.measure.bench import Bench, measured_peaks
from calibrate.measure.budget import Show, progress_bar, seconds
from calibrate.measure.collectives import measure_collectives
from calibrate.measure.engine_profile import entry_of
from calibrate.measure.engine_run import EngineCalibration, calibrate_engine
from calibrate.measure.fit_points import FEWEST, PointFit, fit_tables
from calibrate.measure.machine import describe_machine
from calibrate.measure.overheads import launch_overheads
from calibrate.measure.points import Point, kernel_points, limits_for
from calibrate.measure.store import PointStore, write_csv
from calibrate.measure.traffic import Mix
from sim.cost.hardware import GIB, Gpu, gpu, gpu_from_datasheet
from sim.cost.profile import Entry, Profile, save
from sim.errors import UserError, unknown

KERNEL_SHARE = 0.5
"""Part of the budget for single kernels; the rest is for traffic on the whole engine."""
POINT_S = {"cuda": 0.06, "cpu": 0.08}
"""Sampling time of one point."""


def run_campaign(args: argparse.Namespace, console: Console | None = None) -> Profile:
    """Measure, fit, save and print."""
    console = console or Console(stderr=True)
    device = pick_device(args.device)
    if args.dtype not in DTYPES:
        raise unknown("dtype", args.dtype, DTYPES)
    budget_s = seconds(args.budget)
    arch = architecture(args.model)
    begin = time.monotonic()
    machine = describe_machine(device)
    with one_thread(device), progress_bar() as show:
        show("peaks", 0.0)
        peaks = measured_peaks(device, min(0.3, budget_s / 60))
        chip = _chip(args.gpu, machine, peaks, device)
        store = PointStore(_points_path(args.out), machine)
        points = kernel_points(arch.shape, args.tp, args.dtype, limits_for(device.type, arch.shape))
        share = 1.0 if args.no_engine or args.tp > 1 else KERNEL_SHARE
        left_s = share * budget_s - (time.monotonic() - begin)
        measured = measure_points(points, store, device, left_s, show)
        extra = {"peaks": peaks, "overheads_us": launch_overheads(device, min(0.2, budget_s / 60))}
        collectives = _collectives(args.tp, device)
        engine = None
        if share < 1.0:
            left_s = max(budget_s - (time.monotonic() - begin), 0.2 * budget_s)
            engine = _engine(args, arch, device, left_s, show)
    tables = store.tables(chip.name) | ({"allreduce": collectives} if collectives else {})
    about = f"measured here on {machine['device']}, {machine['date']}, torch {machine['torch']}"
    fits = fit_tables(tables, chip, about)
    noise = {"noisy_points": sum(bool(r["noisy"]) for r in store.rows.values())}
    profile = Profile(
        gpu=chip.name,
        entries=(*(f.entry for f in fits), _overheads(extra["overheads_us"], about),
                 *([entry_of(engine, arch.shape, args.dtype, machine)] if engine else [])),
        provenance=about,
        created=machine["date"],
        meta={**machine, **extra, **noise, "datasheet": asdict(chip), "budget_s": budget_s,
              "took_s": round(time.monotonic() - begin, 1)},
    )  # fmt: skip
    save(profile, args.out)
    if args.csv is not None:
        for name, rows in tables.items():
            write_csv(rows, args.csv / f"{name}.csv")
    _report(console, profile, fits, engine, (measured, len(points)), store)
    return profile


def measure_points(
    points: Sequence[Point], store: PointStore, device: torch.device, budget_s: float, show: Show
) -> int:
    """Time the points that the store does not have, in order, until the budget is spent; of each
    operator at least as many as a fit needs. How many of `points` the store has then."""
    bench = Bench(device)
    end = time.monotonic() + budget_s
    tried: Counter[str] = Counter()
    done = 0
    for point in points:
        show("kernels", done / len(points))
        if point in store:
            done += 1
            tried[point.op] += 1
            continue
        if time.monotonic() > end and tried[point.op] >= FEWEST:
            continue
        try:
            store.add(point, bench.time(point, POINT_S[device.type]), bench.kernel(point))
        except (torch.cuda.OutOfMemoryError, MemoryError):
            torch.cuda.empty_cache()
            store.skip(point, "out of memory")
        except ValueError as error:  # a shape that the kernel does not support
            store.skip(point, str(error))
        done += 1
        tried[point.op] += 1
    return done


def _points_path(out: Path) -> Path:
    name = out.name.removesuffix(".gz").removesuffix(".json")
    return out.with_name(f"{name}.points.jsonl")


def _chip(
    named: str | None, machine: Mapping[str, Any], peaks: Mapping[str, Any], device: torch.device
) -> Gpu:
    """The datasheet of the device; of an unknown one, what was measured takes its place."""
    if named is not None:
        return gpu(named)
    try:
        return gpu(machine["device"])
    except UserError:
        return gpu_from_datasheet(
            {
                "name": machine["device"],
                "arch": "unknown",
                "bf16": peaks["product_tflops"],
                "memory_gib": free_bytes(device) / GIB,
                "bandwidth": peaks["copy_gb_s"],
                "source": "measured here: a matrix product and a copy",
            },
            "calibrate run",
        )


def _overheads(us: Mapping[str, float], about: str) -> Entry:
    return Entry("overhead", {"engine": "tokentwin"}, dict(us), provenance=about)


def _collectives(tp: int, device: torch.device) -> list[dict[str, Any]]:
    return measure_collectives(tp, device.type) if tp > 1 else []


def _engine(
    args: argparse.Namespace, arch: Architecture, device: torch.device, budget_s: float, show: Show
) -> EngineCalibration:
    show("loading the model", 0.0)
    begin = time.monotonic()
    config = engine_config(arch, device.type)
    arch, weights = load_weights_of(
        args.model, arch, device=device, dtype=args.dtype, seed=args.seed
    )
    config = fill_blocks(config, arch.shape.kv_bytes_per_token(), device)
    runner = make_runner(arch, weights, config, TraceTokens(arch.shape.vocab, args.seed))
    mix = Mix()
    if device.type == "cuda":
        mix = replace(mix, prompt_median=600, prompt_p90=2500, prompt_max=config.max_model_len // 2,
                      output_median=60, output_p90=250, output_max=600)  # fmt: skip
    left_s = max(budget_s - (time.monotonic() - begin), 0.5 * budget_s)
    return calibrate_engine(
        runner, config, mix, left_s, seed=args.seed,
        progress=lambda done: show("traffic", done),
    )  # fmt: skip


def _report(
    console: Console,
    profile: Profile,
    fits: Sequence[PointFit],
    engine: EngineCalibration | None,
    measured: tuple[int, int],
    store: PointStore,
) -> None:
    table = Table(title=f"{profile.gpu}: errors on held-out points, per cent")
    for name in ("operator", "kernel", "points", "held out", "median", "p90"):
        table.add_column(name, justify="left" if name in ("operator", "kernel") else "right")
    for f in fits:
        key = f.entry.key
        names = ("kernel", "distribution", "op", "world")
        kernel = " ".join(str(key[name]) for name in names if name in key)
        table.add_row(f.entry.op, kernel, str(f.entry.points), str(f.held),
                      f"{f.holdout_median:.1f}", f"{f.holdout_p90:.1f}")  # fmt: skip
    if engine is not None:
        for name, e in engine.errors.items():
            table.add_row(f"engine: {name}", "in real steps", str(engine.steps), str(e.steps),
                          f"{100 * e.median:.1f}", f"{100 * e.p90:.1f}")  # fmt: skip
    console.print(table)
    noisy = [r for r in store.rows.values() if r["noisy"]]
    console.print(
        f"{measured[0]} of {measured[1]} kernel points measured, {len(noisy)} of them noisy; "
        f"copy {profile.meta['peaks']['copy_gb_s']:.0f} GB/s, "
        f"product {profile.meta['peaks']['product_tflops']:.2f} TFLOP/s"
    )
    took_s, budget_s = profile.meta["took_s"], profile.meta["budget_s"]
    if took_s > 1.2 * budget_s:
        console.print(
            f"took {took_s:.0f} s, longer than the budget of {budget_s:.0f} s: this machine needs "
            f"that for the fewest points of each operator and for the engine"
        )
    if measured[0] < measured[1]:
        console.print("the same command again measures the rest")
