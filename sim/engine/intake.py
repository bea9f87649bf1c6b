"""Which requests an engine can serve at all. Both engines ask here."""

from __future__ import annotations

from sim.engine.config import EngineConfig
from sim.request import Request

CONTEXT = "context"
KV_CAPACITY = "kv-capacity"


def why_rejected(config: EngineConfig, request: Request) -> str | None:
    """Why the engine turns a request away on arrival; None when it will get through.

    `context`: the prompt leaves no room for a token below `max_model_len`. `kv-capacity`: even
    alone in the engine it would not get the KV blocks to finish. (vLLM does not start with a cache
    that cannot hold one sequence of `max_model_len`; with less it would preempt such a request
    over and over.)
    """
    if request.prompt_tokens + 1 > config.max_model_len:
        return CONTEXT
    if blocks_to_finish(config, request) > config.num_usable_blocks:
        return KV_CAPACITY
    return None


def blocks_to_finish(config: EngineConfig, request: Request) -> int:
    """Most blocks the request needs at a time when it is alone, without reservations."""
    # The last output token is never computed.
    tokens = request.prompt_tokens + outputs_until_stop(config, request) - 1
    slots = tokens + config.num_speculative_tokens + config.num_lookahead_tokens
    blocks = -(-min(slots, config.max_model_len) // config.block_size)
    cap = config.max_window_blocks
    return blocks if cap is None else min(blocks, cap)


def allowed_outputs(request: Request) -> int:
    """Output tokens the scheduler must expect: what the client allows, at least what will come."""
    return max(request.output_tokens, request.max_tokens or 0)


def outputs_until_stop(config: EngineConfig, request: Request) -> int:
    """Output tokens after which the request stops: its own end, or the engine's longest context."""
    return min(request.output_tokens, max(config.max_model_len - request.prompt_tokens, 1))
