"""tokentwin's simulator: `from sim import simulate, Scenario`.

    result = simulate(trace="azure.csv", model="llama-3-8b", gpu="a100-80g", policy="chunked")
    result.summary["ttft_s"]["p99"], result.requests, result.steps

Names are loaded when first used, so that `import sim` stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.native import install

if TYPE_CHECKING:
    from sim.errors import UserError
    from sim.request import Request, Segment, Trace
    from sim.result import Result
    from sim.run import Simulation, load_trace, simulate
    from sim.scenario import Scenario

_HOME = {
    "Request": "sim.request",
    "Result": "sim.result",
    "Scenario": "sim.scenario",
    "Segment": "sim.request",
    "Simulation": "sim.run",
    "Trace": "sim.request",
    "UserError": "sim.errors",
    "load_trace": "sim.run",
    "simulate": "sim.run",
}

__all__ = [
    "Request",
    "Result",
    "Scenario",
    "Segment",
    "Simulation",
    "Trace",
    "UserError",
    "load_trace",
    "simulate",
]

install()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sim' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
