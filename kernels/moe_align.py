"""Sorting token slots by expert into tiles of equal height, for the grouped matrix products.

A slot is one (token, choice) pair, numbered token * top_k + choice. Slots of one expert keep their
order, so "the first `capacity` slots" are well defined and results do not depend on timing: no
atomics, three launches
  count: slots per expert in each chunk of slots
  scan:  running sums over the chunks, and where each expert's tiles begin
  place: each slot to its row; each tile to its expert
The host never waits: sizes are upper bounds, tiles past the last one have no rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import runtime

CHUNK = 128  # slots per program; ranks within a chunk come from comparing all its pairs


class Alignment(NamedTuple):
    """Slots in tiles of `block_m` rows, one expert per tile."""

    rows: (
        torch.Tensor
    )  # [tiles * block_m] int32: the slot in each row; undefined past a tile's rows
    tile_expert: torch.Tensor  # [tiles] int32
    tile_rows: torch.Tensor  # [tiles] int32: rows in use, 0 for tiles past the last one
    kept: torch.Tensor  # [slots] int8: 0 where the expert was over its capacity
    counts: torch.Tensor  # [experts] int32: slots routed to each expert, dropped ones included
    block_m: int


@triton.jit(do_not_specialize=["num_slots"])
def _count_kernel(
    Experts,
    Counts,
    num_slots,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_chunk = tl.program_id(0)
    o_s = i_chunk * CHUNK + tl.arange(0, CHUNK)
    mask = o_s < num_slots
    b_e = tl.load(Experts + o_s, mask=mask, other=0)
    b_count = tl.histogram(b_e, EXPERTS_PAD, mask=mask)
    o_e = tl.arange(0, EXPERTS_PAD)
    tl.store(Counts + i_chunk * NUM_EXPERTS + o_e, b_count, mask=o_e < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_chunks", "capacity"])
def _scan_kernel(
    Counts, Totals, TileStart, num_chunks, capacity,
    NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Counts becomes, per chunk, the slots in the chunks before it. One program."""
    o_e = tl.arange(0, EXPERTS_PAD)
    o_c = tl.arange(0, BLOCK_C)
    m_e = o_e < NUM_EXPERTS
    b_total = tl.zeros([EXPERTS_PAD], tl.int32)
    for start in range(0, num_chunks, BLOCK_C):
        p_c = Counts + (start + o_c)[:, None] * NUM_EXPERTS + o_e[None, :]
        mask = (start + o_c < num_chunks)[:, None] & m_e[None, :]
        b_c = tl.load(p_c, mask=mask, other=0)
        tl.store(p_c, b_total[None, :] + tl.cumsum(b_c, 0) - b_c, mask=mask)
        b_total += tl.sum(b_c, 0)
    tl.store(Totals + o_e, b_total, mask=m_e)
    b_tiles = tl.cdiv(tl.minimum(b_total, capacity), BLOCK_M)
    tl.store(TileStart + 1 + o_e, tl.cumsum(b_tiles, 0), mask=m_e)
    tl.store(TileStart, 0)


@triton.jit(do_not_specialize=["num_slots", "num_tiles", "capacity"])
def _place_kernel(
    Experts, Before, Totals, TileStart, Rows, TileExpert, TileRows, Kept,
    num_slots, num_tiles, capacity,
    NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, LOG_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    i_chunk = tl.program_id(0)
    o_c = tl.arange(0, CHUNK)
    o_s = i_chunk * CHUNK + o_c
    mask = o_s < num_slots
    b_e = tl.load(Experts + o_s, mask=mask, other=-1)
    # The same experts once more, along the other axis: rank = equal ones before me in the chunk.
    b_other = tl.load(
        Experts + i_chunk * CHUNK + o_c, mask=i_chunk * CHUNK + o_c < num_slots, other=-1
    )
    earlier = (b_other[None, :] == b_e[:, None]) & (o_c[None, :] < o_c[:, None])
    b_rank = tl.sum(earlier.to(tl.int32), 1) + tl.load(
        Before + i_chunk * NUM_EXPERTS + b_e, mask=mask, other=0
    )
    keep = mask & (b_rank < capacity)
    b_row = tl.load(TileStart + b_e, mask=mask, other=0) * BLOCK_M + b_rank
    tl.store(Rows + b_row, o_s, mask=keep)
    tl.store(Kept + o_s, keep.to(tl.int8), mask=mask)

    # The expert of tile t is the last one whose first tile is at or before t.
    o_t = o_s
    m_t = o_t < num_tiles
    b_lo = tl.zeros([CHUNK], tl.int32)
    for i in tl.static_range(LOG_EXPERTS):
        b_try = b_lo + (EXPERTS_PAD >> (i + 1))
        b_first = tl.load(TileStart + b_try, mask=m_t & (b_try < NUM_EXPERTS), other=2147483647)
        b_lo = tl.where(b_first <= o_t, b_try, b_lo)
    b_first = tl.load(TileStart + b_lo, mask=m_t, other=0)
    b_size = tl.minimum(tl.load(Totals + b_lo, mask=m_t, other=0), capacity)
    b_rows = tl.minimum(tl.maximum(b_size - (o_t - b_first) * BLOCK_M, 0), BLOCK_M)
    tl.store(TileExpert + o_t, b_lo, mask=m_t)
    tl.store(TileRows + o_t, b_rows, mask=m_t)


def align(
    experts: torch.Tensor, num_experts: int, block_m: int, capacity: int | None = None
) -> Alignment:
    """Tiles of `block_m` rows for the choices `experts` [tokens, top_k] int32, each 0 to
    num_experts - 1.

    capacity  slots an expert takes; those past it, in slot order, are dropped (kept = 0). Unlimited
              by default.
    """
    runtime.expect_shape("experts", experts, None, None)
    runtime.one_of("experts dtype", experts.dtype, (torch.int32,))
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    num_slots = experts.numel()
    limit = num_slots if capacity is None else min(capacity, num_slots)
    limit = max(limit, 1)
    # Each expert in use has at most one tile that is not full.
    num_tiles = min(
        num_slots // block_m + min(num_experts, num_slots),
        num_experts * runtime.cdiv(limit, block_m),
    )
    num_chunks = runtime.cdiv(num_slots, CHUNK)
    experts_pad = runtime.next_power_of_2(num_experts)

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return experts.new_empty(shape, dtype=dtype)

    counts, totals, tile_start = (
        new(num_chunks, num_experts),
        new(num_experts),
        new(num_experts + 1),
    )
    result = Alignment(
        rows=new(num_tiles * block_m), tile_expert=new(num_tiles), tile_rows=new(num_tiles),
        kept=new(num_slots, dtype=torch.int8), counts=totals, block_m=block_m,
    )  # fmt: skip
    shape = {"NUM_EXPERTS": num_experts, "EXPERTS_PAD": experts_pad}
    flat = experts.reshape(-1)
    if num_slots == 0:
        totals.zero_()
        return result
    runtime.launch(
        _count_kernel, (num_chunks,), flat, counts, num_slots, **shape, CHUNK=CHUNK, num_warps=4
    )
    runtime.launch(
        _scan_kernel, (1,), counts, totals, tile_start, num_chunks, limit,
        **shape, BLOCK_M=block_m, BLOCK_C=max(1, min(256, 4096 // experts_pad)), num_warps=8,
    )  # fmt: skip
    runtime.launch(
        _place_kernel, (max(num_chunks, runtime.cdiv(num_tiles, CHUNK)),),
        flat, counts, totals, tile_start, result.rows, result.tile_expert, result.tile_rows,
        result.kept,
        num_slots, num_tiles, limit, **shape, LOG_EXPERTS=experts_pad.bit_length() - 1,
        BLOCK_M=block_m, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    return result


def expert_capacity(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Slots of an expert: tokens * top_k / experts * factor, rounded up (Switch, section 2.2)."""
    return max(1, -int(-num_tokens * top_k * factor // num_experts))


def align_reference(
    experts: torch.Tensor, num_experts: int, capacity: int | None = None
) -> list[list[int]]:
    """The kept slots of each expert, in order."""
    slots: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(experts.flatten().tolist()):
        if capacity is None or len(slots[expert]) < capacity:
            slots[expert].append(slot)
    return slots
