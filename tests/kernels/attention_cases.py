"""Random batches over a paged cache, with a readable id for each shape."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class Case:
    """`lens` context lengths, `queries` query tokens of each request (the context's last ones)."""

    lens: tuple[int, ...]
    queries: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    block: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    fp8: bool = False

    def __str__(self) -> str:
        name = f"B{len(self.lens)}-T{max(self.lens)}-Q{max(self.queries)}-HQ{self.heads}"
        name += f"-H{self.kv_heads}-D{self.dim}-P{self.block}"
        name += f"-{str(self.dtype).removeprefix('torch.')}"
        return name + (f"-W{self.window}" if self.window else "") + ("-fp8" if self.fp8 else "")


@dataclass
class Batch:
    """The tensors of a case, as the wrappers take them."""

    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def arguments(self) -> dict:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def build(case: Case, rng: torch.Generator, device: torch.device) -> Batch:
    """Shuffled blocks, garbage (NaN) in every cache slot that belongs to no context, -1 past the
    end of a table row."""
    blocks_of = [-(-n // case.block) for n in case.lens]
    num_blocks = sum(blocks_of) + 3
    order = torch.randperm(num_blocks, generator=rng, device=device).tolist()
    table = torch.full((len(case.lens), max(blocks_of) + 2), -1, dtype=torch.int32, device=device)
    shape = (num_blocks, case.block, case.kv_heads, case.dim)
    k_cache = torch.full(shape, float("nan"), device=device)
    v_cache = torch.full(shape, float("nan"), device=device)
    for i, (length, count) in enumerate(zip(case.lens, blocks_of, strict=True)):
        mine = [order.pop() for _ in range(count)]
        table[i, :count] = torch.tensor(mine, dtype=torch.int32)
        for start, block in enumerate(mine):
            here = min(case.block, length - start * case.block)
            values = torch.randn((2, here, *shape[2:]), generator=rng, device=device)
            k_cache[block, :here], v_cache[block, :here] = values[0], values[1]
    start = torch.tensor([0, *case.queries]).cumsum(0).to(device=device, dtype=torch.int32)
    query = torch.randn((int(start[-1]), case.heads, case.dim), generator=rng, device=device).to(
        case.dtype
    )
    k_scale = v_scale = None
    cache_dtype = case.dtype
    if case.fp8:
        cache_dtype = torch.float8_e4m3fn
        k_scale = 0.5 + torch.rand(case.kv_heads, generator=rng, device=device)
        v_scale = 0.5 + torch.rand(case.kv_heads, generator=rng, device=device)
    lens = torch.tensor(case.lens, dtype=torch.int32, device=device)
    return Batch(
        query,
        k_cache.to(cache_dtype),
        v_cache.to(cache_dtype),
        table,
        lens,
        start,
        k_scale,
        v_scale,
    )


TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Every element within the rounding of `dtype` of the float64 value."""
    torch.testing.assert_close(
        got.to(torch.float64), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
