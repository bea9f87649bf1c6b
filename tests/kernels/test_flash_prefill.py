"""Varlen causal prefill, contiguous and over a paged prefix, against float64."""

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attention_cases import Case, assert_close, build  # noqa: E402

from kernels.attention_reference import attend, paged_attention_reference  # noqa: E402
from kernels.flash_prefill import PrefillConfig, flash_prefill  # noqa: E402

F16, BF16 = torch.float16, torch.bfloat16
SMALL = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)

PAGED = [
    Case((37, 5, 64), (37, 2, 1), 8, 2, 64),
    Case((50, 33), (7, 33), 6, 2, 80, block=1),
    Case((20, 41), (19, 3), 7, 1, 96, block=7),
    Case((60, 12), (20, 12), 4, 4, 128, dtype=F16),
    Case((33, 70, 1), (16, 17, 1), 8, 2, 128, block=64, dtype=BF16),
    Case((40,), (21,), 2, 1, 256, block=32),
    Case((60, 35), (40, 35), 4, 1, 64, window=9),
    Case((80, 23), (30, 1), 8, 2, 64, window=33),
    Case((30, 9), (30, 9), 4, 2, 64, window=1),
    Case((45, 30), (10, 30), 8, 2, 128, dtype=BF16, fp8=True),
]


def run(case, rng, device, **options):
    batch = build(case, rng, device)
    want = paged_attention_reference(**batch.arguments(), window=case.window)
    arguments = batch.arguments()
    got = flash_prefill(
        arguments.pop("query"),
        arguments.pop("k_cache"),
        arguments.pop("v_cache"),
        **arguments,
        max_query_len=max(case.queries),
        window=case.window,
        **options,
    )
    assert got.dtype == case.dtype
    assert_close(got, want, case.dtype)


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_prefill_over_a_paged_prefix_equals_reference(case, rng, device):
    run(case, rng, device, config=SMALL)


@pytest.mark.parametrize("case", [PAGED[4], PAGED[7], PAGED[9]], ids=str)
def test_prefill_with_the_tiles_of_the_chip(case, rng, device):
    run(case, rng, device)


LARGE = [
    Case((2048, 700, 4096), (2048, 300, 1000), 8, 2, 128, dtype=BF16),
    Case((2048, 700), (2048, 300), 8, 2, 128, dtype=BF16, fp8=True),
    Case((3000, 700), (1500, 300), 7, 1, 128, dtype=BF16, window=512),
    Case((1000, 700), (600, 300), 4, 2, 256, dtype=F16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_prefill_of_long_chunks(case, rng, device):
    run(case, rng, device)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 64), (3, 3, 80), (5, 1, 128)])
@pytest.mark.parametrize("window", [None, 11], ids=["causal", "W11"])
def test_contiguous_prefill_equals_reference(heads, kv_heads, dim, window, rng, device):
    starts = [0, 17, 18, 50]
    query = torch.randn((50, heads, dim), generator=rng, device=device)
    key, value = torch.randn((2, 50, kv_heads, dim), generator=rng, device=device)
    got = flash_prefill(
        query,
        key,
        value,
        torch.tensor(starts, dtype=torch.int32, device=device),
        32,
        window=window,
        config=SMALL,
    )
    for lo, hi in pairwise(starts):
        want = attend(query[lo:hi], key[lo:hi], value[lo:hi], dim**-0.5, window)
        assert_close(got[lo:hi], want, torch.float32)


def test_prefill_in_chunks_equals_prefill_at_once(rng, device):
    whole = build(Case((48,), (48,), 4, 2, 64), rng, device)
    caches = (whole.k_cache, whole.v_cache)
    at_once = flash_prefill(
        whole.query, *caches, whole.query_start, 48,
        block_table=whole.block_table, seq_lens=whole.seq_lens, config=SMALL,
    )  # fmt: skip
    for lo, hi in ((0, 13), (13, 29), (29, 48)):
        chunk = flash_prefill(
            whole.query[lo:hi], *caches, torch.tensor([0, hi - lo], dtype=torch.int32,
            device=device), hi - lo,
            block_table=whole.block_table, seq_lens=torch.tensor([hi], dtype=torch.int32,
            device=device), config=SMALL,
        )  # fmt: skip
        torch.testing.assert_close(chunk, at_once[lo:hi], atol=2e-6, rtol=2e-6)


def test_prefill_says_what_it_does_not_support(rng, device):
    query = torch.randn((4, 4, 64), generator=rng, device=device)
    key = torch.randn((4, 2, 64), generator=rng, device=device)
    start = torch.tensor([0, 4], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="pass both block_table and seq_lens"):
        flash_prefill(query, key, key, start, 4, seq_lens=start[1:])
    with pytest.raises(ValueError, match="scale must be positive, got -1"):
        flash_prefill(query, key, key, start, 4, scale=-1)
    with pytest.raises(ValueError, match=r"key: expected shape \(4, \*, 64\), got \(3, 2, 64\)"):
        flash_prefill(query, key[:3], key[:3], start, 4)
    with pytest.raises(ValueError, match="head_dim 32 is not supported"):
        flash_prefill(query[..., :32].contiguous(), key, key, start, 4)
