"""Which settings and requests an engine can serve at all. Both engines ask here."""

from __future__ import annotations

from sim.engine.config import EngineConfig
from sim.errors import UserError
from sim.protocols import SchedulingPolicy
from sim.request import Request

CONTEXT = "context"
KV_CAPACITY = "kv-capacity"


def check_servable(config: EngineConfig) -> None:
    """UserError for settings that vLLM accepts and then gets stuck with, or crashes on."""
    first = min(config.token_budget, config.max_num_batched_tokens - config.draft_slots)
    if not config.enable_chunked_prefill and first < config.max_model_len:
        raise UserError(
            f"engine settings: without chunked prefill a step of {first} tokens cannot hold a "
            f"prompt of up to max_model_len ({config.max_model_len}); raise the token budget"
        )
    if config.speculative and first < config.decode_query_len:
        raise UserError(
            f"engine settings: a step of {first} tokens cannot hold one verification of "
            f"{config.num_speculative_tokens} drafts; raise the token budget"
        )
    threshold = config.long_prefill_token_threshold
    if config.speculative and 0 < threshold < config.decode_query_len:
        raise UserError(
            f"engine settings: long_prefill_token_threshold ({threshold}) must not be smaller than "
            f"1 + num_speculative_tokens ({config.decode_query_len})"
        )


def why_rejected(
    config: EngineConfig, request: Request, policy: SchedulingPolicy | None = None
) -> str | None:
    """Why the engine turns a request away on arrival; None when it will get through.

    `context`: the prompt leaves no room for a token below `max_model_len`. `kv-capacity`: even
    alone in the engine it would not get the KV blocks to finish. (vLLM does not start with a cache
    that cannot hold one sequence of `max_model_len`; with less it would preempt such a request
    over and over.) `policy` matters where it reserves blocks or always keeps some free.
    """
    if request.prompt_tokens + 1 > config.max_model_len:
        return CONTEXT
    blocks = blocks_to_finish(config, request)
    if policy is not None:
        reserved = reserved_tokens(config, policy, request, request.prompt_tokens)
        blocks = max(blocks, -(-reserved // config.block_size))
        if policy.layout == "buddy":
            blocks = power_of_two(blocks)
        if policy.watermark is not None:
            blocks += int(policy.watermark * config.num_blocks)
    return KV_CAPACITY if blocks > config.num_usable_blocks else None


def reserved_tokens(
    config: EngineConfig, policy: SchedulingPolicy, request: Request, num_known: int
) -> int:
    """Tokens for which an admission sets KV blocks aside; 0: none but those the step computes."""
    prompt = request.prompt_tokens
    tokens = {
        "on-demand": 0,
        "prompt": num_known,
        "declared": prompt + allowed_outputs(request),
        "max": config.max_model_len,
        "pow2": prompt + power_of_two(request.output_tokens),
        "oracle": prompt + request.output_tokens,
    }[policy.reserve]
    return min(tokens, config.max_model_len)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number` (>= 1)."""
    return 1 << (number - 1).bit_length()


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
