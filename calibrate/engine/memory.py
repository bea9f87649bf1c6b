"""How many KV blocks the device has room for."""

from __future__ import annotations

import torch

from calibrate.engine.device import free_bytes
from sim.engine.config import EngineConfig
from sim.errors import UserError

MOST_CPU_BYTES = 2 << 30


def fill_blocks(config: EngineConfig, bytes_per_token: int, device: torch.device) -> EngineConfig:
    """With as many blocks as four fifths of the free memory hold, where none are given; the rest
    is for activations. UserError when that is not enough for one request."""
    if config.num_gpu_blocks is not None:
        return config
    free = free_bytes(device)
    if device.type == "cpu":
        free = min(free, MOST_CPU_BYTES)
    blocks = int(0.8 * free / (bytes_per_token * config.block_size))
    if blocks < 2 + config.max_model_len // config.block_size:
        raise UserError(
            f"{free / 1e9:.1f} GB are free on {device} beside the weights, too few for one "
            f"request of max_model_len {config.max_model_len}; set a smaller one"
        )
    return config.with_blocks(min(blocks, config.max_num_seqs * 1024))
