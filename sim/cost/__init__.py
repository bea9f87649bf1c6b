"""How long a step takes, and how much KV cache fits: hardware, model shapes, profiles, composition.

`hardware.gpu` and `models.model` turn names into data, `plan_memory` says how many KV blocks fit,
`build_cost_model` gives the `interface.CostModel` of one replica.
"""

from sim.cost.build import build_cost_model
from sim.cost.memory import Memory, plan_memory

__all__ = ["Memory", "build_cost_model", "plan_memory"]
