"""The server whose logs are fitted: cost models for any scales and constants."""

from __future__ import annotations

from dataclasses import replace

from calibrate.logs.parameters import with_fit
from sim.cost.build import build_cost_model
from sim.cost.host import NO_HOST, HostModel, host_model
from sim.cost.profile import Profile
from sim.cost.server import ServerFit
from sim.cost.step import StepCost
from sim.system import System


def cost_of(system: System, base: Profile, fit: ServerFit) -> StepCost:
    """The cost model of the server with `fit` in its profile."""
    settings = system.scenario.cost
    return build_cost_model(
        system.model,
        system.gpu,
        system.config,
        replace(base, entries=with_fit(base, fit, {})),
        engine_version=settings.engine_version,
        frontend=settings.frontend,
        host_zero=settings.host_zero,
    )


def host_of(system: System, fit: ServerFit) -> HostModel:
    settings = system.scenario.cost
    if settings.host_zero:
        return NO_HOST
    return fit.host_of(host_model(settings.engine_version))
