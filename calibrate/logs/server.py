"""The server whose logs are fitted: cost models for any scales and constants."""

from __future__ import annotations

from dataclasses import replace

from calibrate.logs.parameters import with_fit
from sim.cost.build import build_cost_model
from sim.cost.host import NO_HOST, HostModel, host_model
from sim.cost.interface import CostModel
from sim.cost.models import model
from sim.cost.profile import Profile
from sim.cost.server import ServerFit
from sim.cost.speculative import with_draft
from sim.cost.step import StepCost
from sim.system import System


def cost_of(system: System, base: Profile, fit: ServerFit) -> CostModel:
    """The cost model of the server with `fit` in its profile."""
    target, draft = target_of(system, base, fit), system.config.spec_model
    return target if draft is None else with_draft(target, model(draft))


def target_of(system: System, base: Profile, fit: ServerFit) -> StepCost:
    """The same without the draft model's part, if there is one."""
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
