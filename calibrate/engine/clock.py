"""Which clock measures the work of a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Clock = Callable[[], int]
"""Nanoseconds from some origin."""


def work_clock(device: torch.device) -> Clock:
    """The clock for what `device` does on behalf of this thread.

    With torch on one CPU thread that is the thread's own CPU time: when another process takes the
    core, the device stands still and so does its clock. Everywhere else it is real time.
    """
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time_ns
    return time.perf_counter_ns
