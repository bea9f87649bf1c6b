"""Which device to run on, and which operators it gets."""

from __future__ import annotations

import gc
import os

import torch

from calibrate.engine.ops import Ops
from calibrate.engine.torch_ops import TorchOps
from sim.errors import UserError, unknown

DEVICES = ("cpu", "cuda")


def pick_device(name: str) -> torch.device:
    """`cpu`, `cuda` or `cuda:1`. UserError, saying what to do, for one that is not there."""
    kind, _, index = name.partition(":")
    if kind not in DEVICES or (index and not index.isdigit()):
        raise unknown("device", name, DEVICES)
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        hint = "no NVIDIA GPU is visible" if built else "this torch is built without CUDA"
        raise UserError(f"device {name}: {hint}; use --device cpu, or run it on a machine with one")
    if index and int(index) >= torch.cuda.device_count():
        raise UserError(f"device {name}: this machine has {torch.cuda.device_count()} GPUs")
    return torch.device(name)


def ops_for(device: torch.device) -> Ops:
    """The kernels of `kernels/` on a GPU, torch's operators elsewhere."""
    if device.type == "cuda":
        from calibrate.engine.triton_ops import TritonOps

        return TritonOps()
    return TorchOps()


def free_bytes(device: torch.device) -> int:
    """Memory of the device that is free now."""
    if device.type == "cuda":
        # What torch keeps for later use is free as well.
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
