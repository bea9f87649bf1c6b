"""Paged decode attention against float64, over awkward shapes."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attention_cases import Case, assert_close, build  # noqa: E402

from kernels.attention_reference import paged_attention_reference  # noqa: E402
from kernels.paged_attention import DecodeConfig, paged_decode  # noqa: E402

F16, BF16 = torch.float16, torch.bfloat16
ONE = (1, 1, 1)
SMALL = DecodeConfig(block_n=16, num_warps=4, num_stages=2)

CASES = [
    Case((1, 17, 111), ONE, 8, 2, 64),
    Case((33, 2, 64), ONE, 6, 2, 80, block=1),
    Case((65, 31, 0), ONE, 7, 1, 96, block=7),
    Case((111, 16, 48), ONE, 4, 4, 128, dtype=F16),
    Case((40, 129, 5), ONE, 8, 2, 128, block=64, dtype=BF16),
    Case((70,), (1,), 4, 1, 256, block=32),
    Case((111, 16, 48), ONE, 8, 2, 64, window=20),
    Case((64, 90), (1, 1), 2, 1, 64, window=1),
    Case((50, 97, 6), ONE, 8, 2, 128, dtype=BF16, fp8=True),
    Case((50, 41), (1, 1), 4, 2, 64, dtype=F16, fp8=True, window=17),
]

SPECULATIVE = [
    Case((30, 70, 5), (4, 1, 3), 8, 2, 64),
    Case((77, 19), (5, 5), 3, 1, 80, window=9),
    Case((9, 100), (2, 6), 4, 2, 128, dtype=BF16, fp8=True),
]


def run(case, rng, device, **options):
    batch = build(case, rng, device)
    want = paged_attention_reference(**batch.arguments(), window=case.window)
    arguments = batch.arguments()
    if set(case.queries) == {1}:
        del arguments["query_start"]
    got = paged_decode(
        **arguments,
        max_seq_len=max(case.lens),
        max_query_len=max(case.queries),
        window=case.window,
        **options,
    )
    assert got.dtype == case.dtype
    assert_close(got, want, case.dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_equals_reference(case, rng, device):
    run(case, rng, device, config=SMALL, split_len=32)


@pytest.mark.parametrize("case", SPECULATIVE, ids=str)
def test_decode_of_several_query_tokens_is_causal(case, rng, device):
    run(case, rng, device, config=SMALL, split_len=32)


@pytest.mark.parametrize("case", [CASES[4], CASES[5], CASES[6]], ids=str)
def test_decode_with_the_tiles_of_the_chip(case, rng, device):
    run(case, rng, device)


SERVER = {"lens": tuple(range(900, 2948, 64)), "queries": (1,) * 32, "heads": 32, "kv_heads": 8}
LARGE = [
    Case(**SERVER, dim=128, dtype=BF16),
    Case(**SERVER, dim=128, dtype=BF16, fp8=True),
    Case(**SERVER, dim=64, dtype=F16, window=1024),
    Case(**(SERVER | {"queries": (4,) * 32}), dim=128, dtype=BF16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_decode_of_a_large_batch(case, rng, device):
    run(case, rng, device)


@pytest.mark.gpu
def test_decode_in_a_cuda_graph_follows_the_lengths(rng, device):
    batch = build(Case((700, 900), (1, 1), 8, 2, 128, dtype=BF16), rng, device).arguments()
    del batch["query_start"]
    longest = batch["seq_lens"].clone()
    paged_decode(**batch, max_seq_len=900)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_decode(**batch, max_seq_len=900)
    for fewer in (0, 300, 699):
        batch["seq_lens"].copy_(longest - fewer)
        graph.replay()
        start = torch.tensor([0, 1, 2], device=device)
        want = paged_attention_reference(**batch, query_start=start)
        assert_close(out, want, BF16)


def test_decode_result_does_not_depend_on_the_split(rng, device):
    case = Case((100, 37), (1, 1), 4, 2, 64)
    batch = build(case, rng, device).arguments()
    del batch["query_start"]
    one = paged_decode(**batch, max_seq_len=100, split_len=128, config=SMALL)
    for split_len in (16, 48):
        split = paged_decode(**batch, max_seq_len=100, split_len=split_len, config=SMALL)
        torch.testing.assert_close(split, one, atol=2e-6, rtol=2e-6)


def test_decode_reads_a_head_major_cache(rng, device):
    batch = build(Case((40, 9), (1, 1), 4, 2, 64), rng, device)
    want = paged_attention_reference(**batch.arguments())
    for name in ("k_cache", "v_cache"):
        head_major = getattr(batch, name).transpose(1, 2).contiguous()
        setattr(batch, name, head_major.transpose(1, 2))
    got = paged_decode(
        batch.query,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.seq_lens,
        40,
        config=SMALL,
    )
    assert_close(got, want, torch.float32)


def break_dim(batch):
    batch["query"] = batch["query"][..., :48].contiguous()
    batch["k_cache"] = batch["v_cache"] = batch["k_cache"][..., :48].contiguous()


BROKEN = {
    "head_dim 48 is not supported; supported: 64, 80, 96, 128, 256": break_dim,
    "4 query heads are not a multiple of 3 KV heads": lambda b: b.update(
        {name: b[name].repeat(1, 1, 2, 1)[:, :, :3] for name in ("k_cache", "v_cache")}
    ),
    "block_table holds 1 blocks of 16: too few": lambda b: b.update(
        block_table=b["block_table"][:, :1]
    ),
    "cache dtype bfloat16 is not supported; supported: float32, float8_e4m3fn": lambda b: b.update(
        k_cache=b["k_cache"].bfloat16()
    ),
    "an e4m3 cache needs k_scale and v_scale": lambda b: b.update(
        {name: b[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    ),
    "2 query tokens for 1 requests, up to 1 each: pass query_start": lambda b: b.update(
        seq_lens=b["seq_lens"][:1], block_table=b["block_table"][:1]
    ),
    "max_query_len 65 x 2 heads per KV head exceeds 128 rows: use flash_prefill": lambda b: (
        b.update(query_start=torch.tensor([0, 1, 2]), max_query_len=65)
    ),
    "window must be at least 1, got 0": lambda b: b.update(window=0),
}


@pytest.mark.parametrize("message", BROKEN)
def test_decode_says_what_it_does_not_support(message, rng, device):
    batch = build(Case((40, 9), (1, 1), 4, 2, 64), rng, device).arguments()
    batch.update(query_start=None, max_seq_len=40)
    BROKEN[message](batch)
    with pytest.raises(ValueError) as caught:
        paged_decode(**batch)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
