"""Routing, alignment and the fused mixture-of-experts layer against float64."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attention_cases import assert_close  # noqa: E402

from kernels.fused_moe import MoeConfig, fused_moe, fused_moe_reference  # noqa: E402
from kernels.moe_align import align, align_reference, expert_capacity  # noqa: E402
from kernels.moe_router import route, route_reference  # noqa: E402

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SMALL = MoeConfig(16, 16, 32, group_m=2, num_warps=4, num_stages=2)

ROUTES = {
    "T1-E8-k2": (1, 8, 2, "softmax", True),
    "T77-E60-k4-unnormalised": (77, 60, 4, "softmax", False),
    "T5-E128-k8": (5, 128, 8, "softmax", True),
    "T33-E8-k2-noisy": (33, 8, 2, "noisy", True),
    "T40-E7-switch": (40, 7, 1, "switch", True),
    "T3-E3-k3": (3, 3, 3, "softmax", True),
}


@pytest.mark.parametrize("name", ROUTES)
def test_route_equals_reference(name, rng, device):
    tokens, experts, top_k, method, renormalize = ROUTES[name]
    logits = 2 * torch.randn((tokens, experts), generator=rng, device=device)
    options = {"method": method, "renormalize": renormalize}
    if method == "noisy":
        options["noise"] = torch.randn((tokens, experts), generator=rng, device=device)
        options["noise_logits"] = torch.randn((tokens, experts), generator=rng, device=device)
    got = route(logits, top_k, losses=True, **options)
    want = route_reference(logits, top_k, **options)
    assert torch.equal(got.experts, want.experts)
    for part in ("weights", "z_loss", "balance_loss"):
        assert_close(getattr(got, part), getattr(want, part), F32)


def test_route_of_equal_logits_takes_the_lowest_experts_and_is_balanced(device):
    got = route(torch.zeros((6, 4), device=device), 2, losses=True)
    assert got.experts.tolist() == [[0, 1]] * 6
    assert got.weights.tolist() == [[0.5, 0.5]] * 6
    assert float(got.balance_loss) == pytest.approx(1.0)


def test_route_says_what_it_does_not_support(device):
    logits = torch.zeros((2, 4), device=device)
    with pytest.raises(ValueError, match="top_k 5 is not supported; supported: 1 to 4"):
        route(logits, 5)
    with pytest.raises(ValueError, match="method switch routes to one expert, got top_k 2"):
        route(logits, 2, method="switch")
    with pytest.raises(
        ValueError, match="method topk is not supported; supported: softmax, noisy, switch"
    ):
        route(logits, 2, method="topk")
    with pytest.raises(ValueError, match="noise and noise_logits belong to method noisy"):
        route(logits, 2, method="noisy")


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "block_m", "capacity"),
    [
        (1, 8, 2, 16, None),
        (37, 5, 3, 16, None),
        (300, 4, 2, 32, None),
        (90, 64, 8, 16, None),
        (64, 4, 2, 16, 20),
    ],
    ids=lambda v: str(v),
)
def test_align_sorts_slots_by_expert(tokens, experts, top_k, block_m, capacity, rng, device):
    skew = torch.arange(experts, device=device) * (2.0 / experts)
    chosen = route(
        torch.randn((tokens, experts), generator=rng, device=device) + skew, top_k
    ).experts
    got = align(chosen, experts, block_m, capacity)
    placed = [[] for _ in range(experts)]
    tile_rows, tile_expert = got.tile_rows.tolist(), got.tile_expert.tolist()
    for tile, (count, expert) in enumerate(zip(tile_rows, tile_expert, strict=True)):
        placed[expert] += got.rows[tile * block_m : tile * block_m + count].tolist()
        assert count <= block_m
    want = align_reference(chosen, experts, capacity)
    assert placed == want
    kept = {slot for slots in want for slot in slots}
    assert got.kept.tolist() == [int(slot in kept) for slot in range(tokens * top_k)]
    assert got.counts.tolist() == torch.bincount(chosen.flatten(), minlength=experts).tolist()


def test_expert_capacity_is_rounded_up():
    assert expert_capacity(100, 8, 2, 1.0) == 25
    assert expert_capacity(100, 8, 2, 1.25) == 32
    assert expert_capacity(1, 64, 1, 1.0) == 1


def layer(tokens, experts, top_k, dim, inner, dtype, rng, device):
    def randn(*shape, scale=1.0):
        return (scale * torch.randn(shape, generator=rng, device=device)).to(dtype)

    x = randn(tokens, dim)
    routing = route(randn(tokens, experts), top_k)
    return (
        x,
        randn(experts, 2 * inner, dim, scale=dim**-0.5),
        randn(experts, dim, inner, scale=inner**-0.5),
        routing,
    )


LAYERS = {
    "T1-E8-k2-H64-I48": (1, 8, 2, 64, 48, F32),
    "T33-E4-k2-H100-I40": (33, 4, 2, 100, 40, F32),
    "T20-E7-k3-H64-I96-fp16": (20, 7, 3, 64, 96, F16),
    "T20-E8-k2-H128-I64-bf16": (20, 8, 2, 128, 64, BF16),
}


@pytest.mark.parametrize("name", LAYERS)
def test_moe_equals_reference(name, rng, device):
    case = LAYERS[name]
    arguments = layer(*case, rng, device)
    assert_close(fused_moe(*arguments, config=SMALL), fused_moe_reference(*arguments), case[-1])


@pytest.mark.parametrize("tokens", [3, 40, 300])
def test_moe_with_the_tiles_of_the_chip(tokens, rng, device):
    arguments = layer(tokens, 2, 1, 128, 96, BF16, rng, device)
    assert_close(fused_moe(*arguments), fused_moe_reference(*arguments), BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 3000])
def test_moe_of_many_tokens(tokens, rng, device):
    arguments = layer(tokens, 16, 2, 1024, 768, BF16, rng, device)
    assert_close(fused_moe(*arguments), fused_moe_reference(*arguments), BF16)


def test_moe_over_capacity_passes_on_the_residual(rng, device):
    x, gate_up, down, routing = layer(12, 4, 1, 64, 32, F32, rng, device)
    routing = routing._replace(experts=torch.zeros_like(routing.experts))
    got = fused_moe(x, gate_up, down, routing, capacity=5, residual=x, config=SMALL)
    assert_close(got, fused_moe_reference(x, gate_up, down, routing, capacity=5, residual=x), F32)
    assert torch.equal(got[5:], x[5:])
    assert not torch.equal(got[:5], x[:5])


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "gated"])
def test_moe_with_shared_experts(weighted, rng, device):
    x, gate_up, down, routing = layer(9, 4, 2, 64, 32, F32, rng, device)
    options = {
        "shared_gate_up": 0.1 * torch.randn((2 * 48, 64), generator=rng, device=device),
        "shared_down": 0.1 * torch.randn((64, 48), generator=rng, device=device),
        "shared_weight": torch.rand(9, generator=rng, device=device) if weighted else None,
    }
    got = fused_moe(x, gate_up, down, routing, **options, config=SMALL)
    assert_close(got, fused_moe_reference(x, gate_up, down, routing, **options), F32)


def test_moe_says_what_it_does_not_support(rng, device):
    x, gate_up, down, routing = layer(4, 4, 2, 64, 32, F32, rng, device)
    with pytest.raises(
        ValueError, match=r"gate_up: expected shape \(4, 64, 64\), got \(4, 32, 64\)"
    ):
        fused_moe(x, gate_up[:, :32], down, routing)
    with pytest.raises(ValueError, match="shared_weight needs shared_gate_up"):
        fused_moe(x, gate_up, down, routing, shared_weight=x[:, 0])
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        fused_moe(x, gate_up, down, routing, capacity=0)
