"""Workloads: traces read from files, generated, and transformed (see README.md)."""

from .arrivals import ArrivalProcess, Constant, Gamma, Poisson
from .lengths import Empirical, EmpiricalPairs, Fixed, Lengths, Lognormal, Uniform
from .readers import load, load_lengths
from .sample import sample_path
from .segments import SegmentTable
from .spec import parse_arrivals
from .transforms import limit, scale_rate, take, window, with_arrivals
from .workload import SystemPrompts, Workload, generate

__all__ = [
    "ArrivalProcess",
    "Constant",
    "Empirical",
    "EmpiricalPairs",
    "Fixed",
    "Gamma",
    "Lengths",
    "Lognormal",
    "Poisson",
    "SegmentTable",
    "SystemPrompts",
    "Uniform",
    "Workload",
    "generate",
    "limit",
    "load",
    "load_lengths",
    "parse_arrivals",
    "sample_path",
    "scale_rate",
    "take",
    "window",
    "with_arrivals",
]
