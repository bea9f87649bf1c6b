"""From a model, a GPU and an engine configuration to a cost model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sim.cost.hardware import Gpu
from sim.cost.host import FRONTENDS, NO_HOST, host_model, parse_version
from sim.cost.models import ModelShape
from sim.cost.parallel import RankPlan
from sim.cost.predictor import Predictor
from sim.cost.profile import Profile, for_gpu
from sim.cost.sampling import sorts_for_top_p
from sim.cost.server import server_entry, server_fit
from sim.cost.step import StepCost
from sim.cost.tables import Tables
from sim.engine.config import EngineConfig
from sim.errors import unknown


def build_cost_model(
    model: ModelShape,
    gpu: Gpu,
    engine: EngineConfig,
    profile: Profile | None = None,
    *,
    engine_version: str = "0.33.0",
    frontend: str = "http",
    host_zero: bool = False,
) -> StepCost:
    """The cost of one replica's steps.

    `profile` None takes the built-in one. `frontend` names what stands between the client and the
    engine (`http`, `network`, `in-process`, `none`). `host_zero` leaves out all host time, for
    closed-form checks. A profile that `calibrate from-logs` wrote brings its own host constants and
    scales. Raises UserError for a profile of another GPU or an impossible plan.
    """
    if frontend not in FRONTENDS:
        raise unknown("frontend", frontend, FRONTENDS)
    chosen = for_gpu(gpu) if profile is None else profile
    predictor = Predictor(chosen, gpu)
    if not sorts_for_top_p(parse_version(engine_version)):
        model = replace(model, top_p=False)
    server = server_fit(chosen)
    tables = Tables(RankPlan.of(model, engine), engine, predictor, server.scale)
    host = server.host_of(host_model(engine_version))
    if host_zero:
        host = NO_HOST
    description: dict[str, Any] = {
        "profile": chosen.label,
        "provenance": chosen.provenance,
        "engine_version": engine_version,
        "frontend": frontend,
    }
    entry = server_entry(chosen)
    if entry is not None:
        description["server"] = {**entry.key, **server.to_json(), "provenance": entry.provenance}
    return StepCost(tables, host, server.frontend_of(frontend), description)
