"""Collectives between the GPUs of this machine, one process each."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from sim.errors import UserError

SIZES = tuple(4**i for i in range(4, 14))
"""Bytes: 256 to 64 MB."""
OPS = ("all_reduce", "all_gather", "reduce_scatter")


def measure_collectives(
    world: int, kind: str = "cuda", sizes: tuple[int, ...] = SIZES
) -> list[dict[str, Any]]:
    """Rows in the columns of the public all-reduce timings: op, dtype, world, bytes, us, impl.

    `bytes` counts the whole message. UserError where there are not enough GPUs.
    """
    if kind == "cuda" and torch.cuda.device_count() < world:
        raise UserError(
            f"--tp {world} needs {world} GPUs to time their collectives, this machine has "
            f"{torch.cuda.device_count()}"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.pt"
        spawn(_rank, args=(world, kind, port, sizes, str(target)), nprocs=world, join=True)
        rows: list[dict[str, Any]] = torch.load(target, weights_only=True)
    return rows


def _rank(rank: int, world: int, kind: str, port: int, sizes: tuple[int, ...], target: str) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    backend = "nccl" if kind == "cuda" else "gloo"
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, rank=rank, world_size=world)
    rows = []
    for op in OPS:
        if op == "reduce_scatter" and backend == "gloo":
            continue  # gloo has none
        for size in sizes:
            us = _time(op, size, world, device)
            rows.append({"op": op, "dtype": "bf16", "world": world, "bytes": size, "us": us,
                         "impl": f"{backend}_eager"})  # fmt: skip
    if rank == 0:
        torch.save(rows, target)
    dist.destroy_process_group()


def _time(op: str, size: int, world: int, device: torch.device) -> float:
    """Median microseconds of one call, launch included, as seen by this rank."""
    count = max(world, size // 2 // world * world)
    whole = torch.zeros(count, dtype=torch.bfloat16, device=device)
    part = torch.zeros(count // world, dtype=torch.bfloat16, device=device)

    def call() -> None:
        if op == "all_reduce":
            dist.all_reduce(whole)
        elif op == "all_gather":
            dist.all_gather_into_tensor(whole, part)
        else:
            dist.reduce_scatter_tensor(part, whole)

    repeats = 20 if size <= 1 << 20 else 5
    samples = []
    for attempt in range(7):
        _barrier(device)
        start = time.perf_counter_ns()
        for _ in range(repeats):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if attempt > 1:
            samples.append((time.perf_counter_ns() - start) / repeats / 1e3)
    return sorted(samples)[len(samples) // 2]


def _barrier(device: torch.device) -> None:
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
