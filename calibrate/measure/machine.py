"""What was measured on: the device, its clocks, and the versions of what ran."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sim.cost.hardware import gpu
from sim.errors import UserError


def device_name(device: torch.device) -> str:
    """The GPU's canonical name where it is a known one, else its own; the CPU's model name."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        try:
            return gpu(name).name
        except UserError:
            return name
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Device, versions, clocks and date, for a profile's `meta`."""
    found: dict[str, Any] = {
        "device": device_name(device),
        "kind": device.type,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "tokentwin": _version("tokentwin"),
    }
    if device.type == "cuda":
        found |= {"cuda": torch.version.cuda, "count": torch.cuda.device_count()}
        found |= _nvidia_smi(device)
    else:
        found |= {"threads": torch.get_num_threads(), "cores": os.cpu_count()}
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _nvidia_smi(device: torch.device) -> dict[str, Any]:
    """Driver, clocks and power as the driver reports them; empty where it cannot be asked."""
    fields = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit",
              "temperature.gpu")  # fmt: skip
    index = device.index if device.index is not None else torch.cuda.current_device()
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits",
             f"--id={index}"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [v.strip() for v in done.stdout.strip().split(",")]
    return dict(zip((f.replace(".", "_") for f in fields), values, strict=False))
