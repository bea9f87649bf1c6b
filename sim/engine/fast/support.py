"""What the fast engine can do. Everything else runs on the plain one."""

from __future__ import annotations

from sim.engine.config import EngineConfig
from sim.protocols import EvictionPolicy, SchedulingPolicy, overrides

_DECLARED = ("compose", "reserve", "layout", "preempt")
_HOOKS = ("victim", "displace", "limits", "on_admit", "on_tokens", "plan")


def supports(
    config: EngineConfig,
    policy: SchedulingPolicy | None = None,
    eviction: EvictionPolicy | None = None,
) -> bool:
    """Whether `FastEngine` serves this configuration exactly as `PlainEngine` does."""
    return why_plain(config, policy, eviction) is None


def why_plain(
    config: EngineConfig,
    policy: SchedulingPolicy | None = None,
    eviction: EvictionPolicy | None = None,
) -> str | None:
    """What the fast engine cannot do of this configuration; None when it can do all of it.

    No policy stands for vLLM's own.
    """
    if config.pipeline_parallel_size > 1:
        return "pipeline parallelism"
    if config.speculative:
        return "speculative decoding"
    if config.sliding_window is not None:
        return "sliding window"
    if config.prefill_schedule_interval > 1:
        return "prefill_schedule_interval"
    if config.enable_prefix_caching and eviction is not None and not eviction.free_queue:
        return f"eviction policy {type(eviction).__name__}"
    if policy is None:
        return None
    for name in _DECLARED:
        if getattr(policy, name) != getattr(SchedulingPolicy, name):
            return f"scheduling policy with {name}={getattr(policy, name)}"
    for hook in _HOOKS:
        if overrides(policy, hook):
            return f"scheduling policy with its own {hook}()"
    if policy.order == "key-each-step":
        return "scheduling policy with keys that move (order=key-each-step)"
    return None
