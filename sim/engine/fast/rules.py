"""The settings the fast scheduler plans by."""

from __future__ import annotations

from dataclasses import dataclass

from sim.engine.config import EngineConfig
from sim.protocols import SchedulingPolicy

NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits of a row and of an admission."""

    budget: int
    """Tokens of a row."""
    max_running: int
    chunked: bool
    """May a prompt be spread over rows?"""
    whole_must_fit: bool
    """Is a sequence admitted only if all its known tokens fit?"""
    threshold: int
    """Most tokens of one sequence in a row while others are there; 0 is no limit ..."""
    adaptive: bool
    """... or a fair share of `max_batched`, if that is more."""
    max_batched: int
    spare_blocks: int
    """Blocks an admission leaves free ..."""
    watermark_blocks: int
    """... and so many more while something runs."""

    @classmethod
    def of(cls, config: EngineConfig, policy: SchedulingPolicy | None) -> Rules:
        spare_blocks, watermark_blocks = 0, int(config.watermark * config.num_blocks)
        if policy is not None and policy.watermark is not None:
            spare_blocks, watermark_blocks = int(policy.watermark * config.num_blocks), 0
        return cls(
            budget=min(config.token_budget, config.max_num_batched_tokens),
            max_running=config.max_num_admitted_seqs,
            chunked=config.enable_chunked_prefill,
            whole_must_fit=config.scheduler_reserve_full_isl,
            threshold=config.long_prefill_token_threshold,
            adaptive=config.long_prefill_token_threshold_adaptive,
            max_batched=config.max_num_batched_tokens,
            spare_blocks=spare_blocks,
            watermark_blocks=watermark_blocks,
        )

    def most_per_sequence(self, present: int) -> int:
        """Most tokens for one of `present` sequences; one that is alone has nobody to starve."""
        if not self.threshold or present <= 1:
            return NO_LIMIT
        if self.adaptive:
            return max(self.threshold, self.max_batched // present)
        return self.threshold
