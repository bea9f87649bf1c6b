"""RMSNorm, activation, rotary embedding with the cache write, and block moves, against float64."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attention_cases import assert_close  # noqa: E402

from kernels.activation import silu_and_mul, silu_and_mul_reference  # noqa: E402
from kernels.blocks import copy_blocks, copy_blocks_reference, swap_blocks  # noqa: E402
from kernels.norm import rms_norm, rms_norm_reference  # noqa: E402
from kernels.rope import cos_sin_table, rope_and_cache, rope_reference  # noqa: E402

F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 64), (7, 100), (3, 2048), (2, 5120)])
@pytest.mark.parametrize("add", [False, True], ids=["alone", "residual"])
def test_rms_norm_equals_reference(tokens, dim, add, dtype, rng, device):
    x = torch.randn((tokens, dim), generator=rng, device=device).to(dtype)
    weight = torch.randn(dim, generator=rng, device=device).to(dtype)
    residual = torch.randn((tokens, dim), generator=rng, device=device).to(dtype) if add else None
    want = rms_norm_reference(x, weight, 1e-5, residual)
    total = x + residual if add else None
    assert_close(rms_norm(x, weight, 1e-5, residual=residual), want, dtype)
    if add:
        # Not `equal`: the interpreter cuts fp32 to bf16 where the GPU and torch round.
        assert_close(residual, total.double(), dtype)


def test_rms_norm_of_heads_in_a_fused_projection(rng, device):
    fused = torch.randn((5, 6 * 64), generator=rng, device=device)
    heads = fused[:, 64 : 5 * 64].view(5, 4, 64)
    weight = torch.randn(64, generator=rng, device=device)
    before = fused.clone()
    want = rms_norm_reference(heads, weight)
    rms_norm(heads, weight, out=heads)
    assert_close(heads, want, F32)
    assert torch.equal(fused[:, :64], before[:, :64])
    assert torch.equal(fused[:, 5 * 64 :], before[:, 5 * 64 :])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 1), (3, 100), (2, 2500)])
def test_silu_and_mul_equals_reference(tokens, dim, dtype, rng, device):
    x = (4 * torch.randn((tokens, 2 * dim), generator=rng, device=device)).to(dtype)
    assert_close(silu_and_mul(x), silu_and_mul_reference(x), dtype)


@pytest.mark.filterwarnings("ignore:overflow")
def test_silu_of_large_numbers_is_finite(device):
    x = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=device)
    assert silu_and_mul(x).tolist() == [[0.0, 200.0]]


ROPE = {
    "T5-HQ8-H2-D64": (5, 8, 2, 64, 64, False, F32, F32),
    "T3-HQ3-H1-D80-interleaved": (3, 3, 1, 80, 80, True, F32, F32),
    "T4-HQ4-H4-D96-rotary32": (4, 4, 4, 96, 32, False, F32, F32),
    "T6-HQ7-H1-D128-bf16": (6, 7, 1, 128, 128, False, BF16, BF16),
    "T6-HQ4-H2-D128-fp8": (6, 4, 2, 128, 128, False, BF16, FP8),
    "T4-HQ2-H2-D64-rotary16-fp8": (4, 2, 2, 64, 16, True, F32, FP8),
}


@pytest.mark.parametrize("name", ROPE)
def test_rope_turns_and_writes_the_cache(name, rng, device):
    tokens, heads, kv_heads, dim, rotary_dim, interleaved, dtype, cache_dtype = ROPE[name]
    block_size, num_blocks = 4, 5
    fused = torch.randn((tokens, (heads + 2 * kv_heads) * dim), generator=rng, device=device).to(
        dtype
    )
    query, key, value = fused.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    query, key, value = (t.view(tokens, -1, dim) for t in (query, key, value))
    table = cos_sin_table(100, rotary_dim, device=device)
    positions = torch.randint(0, 100, (tokens,), generator=rng, device=device)
    slots = torch.randperm(block_size * num_blocks, generator=rng, device=device)[:tokens]
    slots[1] = -1
    caches = [
        torch.zeros((num_blocks, block_size, kv_heads, dim), device=device).to(cache_dtype)
        for _ in range(2)
    ]
    scales = {}
    if cache_dtype == FP8:
        # A small scale, so that some numbers saturate and others fall below the smallest normal
        # one.
        scales = {
            "k_scale": torch.full((kv_heads,), 0.004, device=device),
            "v_scale": torch.full((kv_heads,), 50.0, device=device),
        }
    want_q = rope_reference(query, table, positions, interleaved)
    want_k = rope_reference(key, table, positions, interleaved)
    want_v = value.clone()
    rope_and_cache(
        query, key, value, table, positions, *caches, slots, interleaved=interleaved, **scales
    )
    assert_close(query, want_q, dtype)
    assert_close(key, want_k, dtype)
    assert torch.equal(value, want_v)

    for cache, written, scale in zip(
        caches, (key, value), scales.values() or (None, None), strict=True
    ):
        want = torch.zeros((num_blocks * block_size, kv_heads, dim), device=device)
        stored = written.float()
        if scale is not None:
            stored = (stored * (1.0 / scale[0])).clamp(-448, 448).to(FP8).float()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                want[slot] = stored[token]
        assert torch.equal(cache.float().view(-1, kv_heads, dim), want)


def test_copy_blocks_copies_and_touches_nothing_else(rng, device):
    caches = [
        torch.randn((6, 16, 2, 40), generator=rng, device=device).to(dtype)
        for dtype in (F32, BF16, FP8)
    ]
    pairs = [(0, 3), (0, 5), (2, 1)]
    want = copy_blocks_reference([c.float() for c in caches], pairs)
    copy_blocks(caches, pairs)
    for cache, expected in zip(caches, want, strict=True):
        assert torch.equal(cache.float(), expected)
    copy_blocks(caches, [])


def test_swap_blocks_to_the_host_and_back(rng, device):
    cache = torch.randn((8, 4, 2, 8), generator=rng, device=device)
    before = cache.clone()
    host = torch.zeros((4, 4, 2, 8))
    swap_blocks(cache, host, [(6, 0), (7, 1), (2, 3)])
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host[[0, 1, 3]], before[[6, 7, 2]].cpu())
    cache.zero_()
    swap_blocks(host, cache, [(0, 6), (1, 7), (3, 2)])
    assert torch.equal(cache[[6, 7, 2]], before[[6, 7, 2]])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 1), (2, 1)], "block 1 is copied onto twice"),
        ([(0, 1), (1, 2)], "block 1 is both copied from and onto"),
        ([(0, 9)], "cache: block 9 of 3"),
        ([(-1, 1)], "block numbers must not be negative"),
    ],
)
def test_copy_blocks_refuses(pairs, message, device):
    with pytest.raises(ValueError, match=message):
        copy_blocks([torch.zeros((3, 2, 1, 8), device=device)], pairs)


def test_layer_kernels_say_what_they_do_not_support(device):
    x = torch.zeros((2, 64), device=device)
    with pytest.raises(ValueError, match=r"weight: expected shape \(64\), got \(32,\)"):
        rms_norm(x, x[0, :32])
    with pytest.raises(ValueError, match="x dtype float64 is not supported"):
        rms_norm(x.double(), x[0])
    with pytest.raises(ValueError, match="the last axis must be contiguous, its stride is 64"):
        rms_norm(x.t(), x[:, 0])
    with pytest.raises(ValueError, match=r"expected shape \(tokens, 2 \* dim\)"):
        silu_and_mul(x[:, :63])
