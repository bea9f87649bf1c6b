"""Moving KV blocks: copies within the cache (copy-on-write), swaps to and from host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels import fp8, runtime

Pairs = Sequence[tuple[int, int]]


@triton.jit
def _copy_kernel(Cache, PairTable, block_numel, s_block, BLOCK: tl.constexpr):
    i_pair, i_part = tl.program_id(0), tl.program_id(1)
    source = tl.load(PairTable + 2 * i_pair)
    target = tl.load(PairTable + 2 * i_pair + 1)
    o_n = i_part * BLOCK + tl.arange(0, BLOCK)
    mask = o_n < block_numel
    b_x = tl.load(Cache + source * s_block + o_n, mask=mask)
    tl.store(Cache + target * s_block + o_n, b_x, mask=mask)


def copy_blocks(caches: Sequence[torch.Tensor], pairs: Pairs) -> None:
    """Copy block `source` onto block `target` for each pair (source, target), in every cache.

    Each cache is [blocks, ...] with contiguous blocks. The pairs run at once, so a target may
    appear only once and not as a source; ValueError otherwise.
    """
    _check_pairs(pairs)
    sources = {source for source, _ in pairs}
    for _, target in pairs:
        if target in sources:
            raise ValueError(
                f"block {target} is both copied from and onto: order the copies in two calls"
            )
    for cache in caches:
        _check_cache("cache", cache, max((max(pair) for pair in pairs), default=0))
    if not pairs:
        return
    tables = {
        device: torch.tensor(pairs, dtype=torch.int64, device=device)
        for device in {c.device for c in caches}
    }
    for cache in caches:
        numel = cache[0].numel()
        block = min(4096, runtime.next_power_of_2(numel))
        runtime.launch(
            _copy_kernel, (len(pairs), runtime.cdiv(numel, block)),
            fp8.as_bytes(cache), tables[cache.device], numel, cache.stride(0), BLOCK=block,
            num_warps=4,
        )  # fmt: skip


def swap_blocks(source: torch.Tensor, target: torch.Tensor, pairs: Pairs) -> None:
    """Copy block i of `source` onto block j of `target` for each pair (i, j); between devices, or
    on one.

    Both are [blocks, ...] of one dtype and block shape. Neighbouring pairs travel in one copy. The
    copies are queued on the current stream; they overlap with the host when the host side is
    pinned.
    """
    _check_pairs(pairs)
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(
            f"source blocks {tuple(source.shape[1:])} {source.dtype} and target blocks "
            f"{tuple(target.shape[1:])} {target.dtype} differ"
        )
    _check_cache("source", source, max((i for i, _ in pairs), default=0))
    _check_cache("target", target, max((j for _, j in pairs), default=0))
    for i, j, count in _runs(pairs):
        target[j : j + count].copy_(source[i : i + count], non_blocking=True)


def _runs(pairs: Pairs) -> list[tuple[int, int, int]]:
    """Pairs joined where both sides are neighbours: (first source, first target, count)."""
    runs: list[tuple[int, int, int]] = []
    for i, j in sorted(pairs):
        if runs and runs[-1][0] + runs[-1][2] == i and runs[-1][1] + runs[-1][2] == j:
            first_i, first_j, count = runs[-1]
            runs[-1] = (first_i, first_j, count + 1)
        else:
            runs.append((i, j, 1))
    return runs


def _check_pairs(pairs: Pairs) -> None:
    targets = [target for _, target in pairs]
    if len(set(targets)) < len(targets):
        twice = next(t for t in targets if targets.count(t) > 1)
        raise ValueError(f"block {twice} is copied onto twice")
    if any(block < 0 for pair in pairs for block in pair):
        raise ValueError("block numbers must not be negative")


def _check_cache(name: str, cache: torch.Tensor, largest: int) -> None:
    if not cache[0].is_contiguous():
        raise ValueError(
            f"{name}: a block must be contiguous, its strides are {cache.stride()[1:]}"
        )
    if largest >= cache.shape[0]:
        raise ValueError(f"{name}: block {largest} of {cache.shape[0]}")


def copy_blocks_reference(caches: Sequence[torch.Tensor], pairs: Pairs) -> list[torch.Tensor]:
    """The caches after `copy_blocks`, as new tensors."""
    copies = [cache.clone() for cache in caches]
    for copy, cache in zip(copies, caches, strict=True):
        for source, target in pairs:
            copy[target] = cache[source]
    return copies
