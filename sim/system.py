"""A scenario with every name resolved: model, GPU, engine configuration, cost model, engines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sim.cost import build_cost_model, plan_memory
from sim.cost.hardware import Gpu, catalogue, gpu
from sim.cost.host import parse_version
from sim.cost.interface import CostModel
from sim.cost.models import ModelShape, model, quantised
from sim.cost.profile import Profile, for_gpu
from sim.cost.profile import load as load_profile
from sim.cost.speculative import with_draft
from sim.engine.config import EngineConfig
from sim.engine.config_check import SPECULATIVE_MODELS
from sim.engine.executor import AcceptanceRate, Executor
from sim.engine.interface import Engine
from sim.errors import UserError, unknown
from sim.metrics.kv import keeps_more_than_it_uses
from sim.protocols import EvictionPolicy, SchedulingPolicy
from sim.registry import make_policy
from sim.scenario import PolicyChoice, Scenario


@dataclass
class System:
    """A scenario with every name resolved: what is needed to make engines."""

    scenario: Scenario
    model: ModelShape
    gpu: Gpu
    config: EngineConfig
    cost: CostModel
    notes: list[str]
    """What was decided for the user and is worth knowing."""

    @classmethod
    def of(cls, scenario: Scenario) -> System:
        shape, device = model(scenario.model), gpu(scenario.gpu)
        if scenario.engine.get("quantization") is not None:
            shape = quantised(shape, scenario.engine["quantization"])
        notes: list[str] = []
        policy = policy_of("scheduling", scenario.policy, scenario.seed, 0)
        config = _engine_config(scenario, shape, device, policy, notes)
        version = parse_version(scenario.cost.engine_version)
        draft = _draft_model(config, notes)
        if config.num_gpu_blocks is None:
            memory = plan_memory(shape, device, config, version, draft)
            config = config.with_blocks(memory.num_blocks)
            room = config.num_usable_blocks * config.block_size
            if room < config.max_model_len and config.sliding_window is None:
                notes.append(
                    f"the KV cache holds {room} tokens, less than max_model_len "
                    f"({config.max_model_len}): vLLM would not start, here requests that are too "
                    f"long are rejected"
                )
        else:
            plan_memory(shape, device, config, version, draft)  # the weights must fit all the same
        profile = scenario.cost.profile
        target = build_cost_model(
            shape,
            device,
            config,
            profile_of(profile) if profile is not None else None,
            engine_version=scenario.cost.engine_version,
            frontend=scenario.cost.frontend,
            host_zero=scenario.cost.host_zero,
        )
        cost = target if draft is None else with_draft(target, draft)
        return cls(scenario, shape, device, config, cost, notes)

    @cached_property
    def why_plain(self) -> str | None:
        """Why only the plain engine can run this scenario; None when the fast one can too."""
        from sim.engine.fast import why_plain

        return why_plain(self.config, self.policy(0), self.eviction(0))

    @property
    def fast(self) -> bool:
        """Whether the fast engine runs what is modelled."""
        return self.scenario.fast_forward and self.why_plain is None

    def policy(self, replica: int) -> SchedulingPolicy:
        """A new scheduling policy object for one replica."""
        made: SchedulingPolicy = policy_of(
            "scheduling", self.scenario.policy, self.scenario.seed, replica
        )
        return made

    def eviction(self, replica: int) -> EvictionPolicy:
        """A new eviction policy object for one replica."""
        made: EvictionPolicy = policy_of(
            "eviction", self.scenario.eviction, self.scenario.seed, replica
        )
        return made

    def engine(
        self, replica: int, cost: CostModel | None = None, executor: Executor | None = None
    ) -> Engine:
        """A new, empty engine with policies of its own; `cost` instead of the system's, and
        `executor` instead of the modelled one."""
        cost = self.cost if cost is None else cost
        if self.fast and executor is None:
            from sim.engine.fast import FastEngine

            return FastEngine(self.config, cost, self.policy(replica), self.eviction(replica))
        from sim.engine.plain import PlainEngine

        policy = self.policy(replica)
        return PlainEngine(
            self.config,
            cost,
            policy,
            self.eviction(replica),
            executor=executor,
            acceptance=AcceptanceRate(seed=self.scenario.seed),
            track_waste=keeps_more_than_it_uses(policy),
        )


def _engine_config(
    scenario: Scenario,
    shape: ModelShape,
    device: Gpu,
    policy: SchedulingPolicy,
    notes: list[str],
) -> EngineConfig:
    settings, name = dict(scenario.engine), scenario.policy.name
    if settings.get("sliding_window") is None and shape.sliding_layers is None:
        settings["sliding_window"] = shape.sliding_window
    settings["quantization"] = None  # the shape has it
    if policy.chunked_prefill is not None:
        if settings.get("enable_chunked_prefill", policy.chunked_prefill) != policy.chunked_prefill:
            notes.append(f"enable_chunked_prefill is {policy.chunked_prefill}, as {name} demands")
        settings["enable_chunked_prefill"] = policy.chunked_prefill
        longest = settings.get("max_model_len") or shape.context
        budget = settings.get("max_num_batched_tokens")
        if not policy.chunked_prefill and budget is not None and budget < longest:
            settings["max_num_batched_tokens"] = longest
            notes.append(
                f"max_num_batched_tokens raised from {budget} to {longest}: {name} "
                f"computes prompts whole, up to max_model_len"
            )
    if policy.layout != "paged":
        if settings.get("enable_prefix_caching"):
            notes.append(f"enable_prefix_caching is off: the KV cache of {name} has no pages")
        settings["enable_prefix_caching"] = False
    if (settings.get("max_model_len") or 0) > shape.context:
        notes.append(
            f"max_model_len {settings['max_model_len']} is beyond the {shape.context} tokens that "
            f"{shape.name} knows; vLLM wants VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 for that"
        )
    return EngineConfig.for_gpu(device.name, device.memory_bytes, shape.context, settings)


def profile_of(name: str) -> Profile:
    """The profile in a file, or the built-in one of the GPU of that name (or alias). Raises
    UserError with the nearest match."""
    path = Path(name)
    if path.suffix in (".json", ".gz") or len(path.parts) > 1 or path.is_file():
        return load_profile(path)
    try:
        return for_gpu(gpu(name))
    except UserError:
        raise unknown("profile", name, catalogue()) from None


def _draft_model(config: EngineConfig, notes: list[str]) -> ModelShape | None:
    if config.spec_model is not None:
        return model(config.spec_model)
    if config.speculative and config.spec_method != "ngram":
        hint = ""
        if config.spec_method in SPECULATIVE_MODELS:
            hint = "; name the model that drafts in engine.spec_model"
        notes.append(
            f"drafting with {config.spec_method} takes no time and no memory in this simulation"
            f"{hint}"
        )
    return None


def policy_of(kind: str, choice: PolicyChoice, seed: int, index: int) -> Any:
    """A new policy object with a random stream of its own."""
    policy = make_policy(kind, choice.name, choice.options)
    stream = ("scheduling", "eviction", "admission", "routing").index(kind)
    policy.prepare(np.random.default_rng([seed, stream, index]))
    return policy
