"""Sampling and the verification of drafts, against float64 and against the distributions they
promise."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernels.sampling import (  # noqa: E402
    greedy,
    probabilities,
    probabilities_reference,
    sample,
    sample_reference,
)
from kernels.speculative import verify_drafts, verify_drafts_reference  # noqa: E402


def tensor(values, device, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize("vocab", [1, 7, 1500])
def test_greedy_takes_the_first_of_the_largest(vocab, rng, device):
    logits = torch.randn((4, vocab), generator=rng, device=device).round(decimals=0)
    assert greedy(logits).tolist() == logits.argmax(-1).tolist()
    assert greedy(torch.zeros((2, vocab), device=device)).tolist() == [0, 0]


CUTS = {
    "plain": ([1.0, 0.7, 2.0], None, None),
    "top-k": ([1.0, 0.7, 2.0], [1, 5, 0], None),
    "top-p": ([1.0, 0.7, 2.0], None, [0.5, 0.9, 1.0]),
    "both": ([1.0, 0.7, 0.0], [40, 3, 10], [0.8, 0.5, 0.3]),
    "top-p-tiny": ([1.0, 1.0, 1.0], None, [0.0, 1e-6, 0.999999]),
}


def cut(name, device):
    temperature, top_k, top_p = CUTS[name]
    return tensor(temperature, device), {
        "top_k": None if top_k is None else tensor(top_k, device, torch.int32),
        "top_p": None if top_p is None else tensor(top_p, device),
    }


@pytest.mark.parametrize("vocab", [50, 1300])
@pytest.mark.parametrize("name", CUTS)
def test_probabilities_equal_those_by_sorting(name, vocab, rng, device):
    logits = 3 * torch.randn((3, vocab), generator=rng, device=device)
    temperature, options = cut(name, device)
    got = probabilities(logits, temperature, **options)
    want = probabilities_reference(logits, temperature, **options)
    if name != "top-p-tiny":  # its 0.999999 is decided by the last bit of a sum
        assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(got.sum(-1), torch.ones(3, device=device), atol=1e-5, rtol=0)


def test_top_k_keeps_ties_and_forbidden_tokens_stay_out(device):
    logits = tensor([[2.0, 1.0, 1.0, 0.0, float("-inf")]], device)
    got = probabilities(logits, tensor([1.0], device), top_k=tensor([2], device, torch.int32))
    assert (got > 0).tolist() == [[True, True, True, False, False]]
    got = probabilities(logits, tensor([1.0], device))
    assert (got > 0).tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize("name", CUTS)
def test_sample_follows_its_uniform(name, rng, device):
    logits = 3 * torch.randn((3, 1300), generator=rng, device=device)
    temperature, options = cut(name, device)
    uniforms = tensor([0.37, 0.0, 0.99], device)
    want = sample_reference(probabilities_reference(logits, temperature, **options), uniforms)
    assert sample(logits, temperature, uniforms, **options).tolist() == want.tolist()


def test_sample_of_half_precision_logits(rng, device):
    logits = torch.randn((2, 100), generator=rng, device=device).half()
    temperature, uniforms = tensor([0.0, 1.0], device), tensor([0.5, 0.5], device)
    want = sample_reference(probabilities_reference(logits, temperature), uniforms)
    assert sample(logits, temperature, uniforms).tolist() == want.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUTS)
def test_probabilities_over_a_large_vocabulary(name, rng, device):
    logits = 3 * torch.randn((3, 128_256), generator=rng, device=device)
    temperature, options = cut(name, device)
    got = probabilities(logits, temperature, **options)
    want = probabilities_reference(logits, temperature, **options)
    # A token on the edge of the nucleus may fall either way by the last bit of a sum.
    assert (got.double() - want).abs().sum(-1).max() < 1e-3


def softmax_randn(*shape, rng, device):
    return (1.5 * torch.randn(shape, generator=rng, device=device)).softmax(-1)


@pytest.mark.parametrize("known", [True, False], ids=["draft-model", "n-gram"])
@pytest.mark.parametrize(("requests", "k", "vocab"), [(16, 1, 5), (16, 3, 50), (4, 5, 2100)])
def test_verify_equals_reference(requests, k, vocab, known, rng, device):
    target = softmax_randn(requests, k + 1, vocab, rng=rng, device=device)
    draft = 0.5 * target[:, :k] + 0.5 * softmax_randn(requests, k, vocab, rng=rng, device=device)
    tokens = torch.multinomial(draft.flatten(0, 1), 1, generator=rng).view(requests, k)
    uniforms = torch.rand((requests, k), generator=rng, device=device)
    if not known:
        uniforms *= 0.2  # a target of many tokens rejects nearly all drafts that claim certainty
    last = torch.rand(requests, generator=rng, device=device)
    count = torch.arange(requests, dtype=torch.int32, device=device) % (k + 1)
    arguments = (tokens, draft if known else None, target, uniforms, last, count)
    got = verify_drafts(*arguments)
    lists = [
        row[: n + 1] for row, n in zip(got.tokens.tolist(), got.num_accepted.tolist(), strict=True)
    ]
    assert lists == verify_drafts_reference(*arguments)
    if known or vocab < 100:
        assert len({len(row) for row in lists}) > 1  # some accepted, some not


def test_verify_accepts_everything_when_draft_and_target_agree(rng, device):
    target = softmax_randn(6, 4, 9, rng=rng, device=device)
    tokens = torch.multinomial(target[:, :3].flatten(0, 1), 1, generator=rng).view(6, 3)
    uniforms = torch.rand((6, 3), generator=rng, device=device)
    got = verify_drafts(tokens, target[:, :3], target, uniforms, uniforms[:, 0])
    assert got.num_accepted.tolist() == [3] * 6
    assert torch.equal(got.tokens[:, :3], tokens)


def test_verify_draws_from_the_target_when_nothing_is_left_over(device):
    half = tensor([[[0.5, 0.5], [0.5, 0.5]]], device)
    drafts, rejecting = tensor([[0]], device, torch.int64), tensor([[1.0]], device)
    got = verify_drafts(drafts, half[:, :1], half, rejecting, tensor([0.7], device))
    assert got.num_accepted.tolist() == [0]
    assert got.tokens[0, 0] == 1


def test_verify_of_greedy_rows_compares_tokens(device):
    target = torch.nn.functional.one_hot(tensor([[1, 2, 3]], device, torch.int64), 5).float()
    uniforms = tensor([[0.9, 0.9]], device)
    got = verify_drafts(
        tensor([[1, 4]], device, torch.int64), None, target, uniforms, tensor([0.9], device)
    )
    assert got.num_accepted.tolist() == [1]
    assert got.tokens[0, :2].tolist() == [1, 2]


def chi_square_p(tokens, probability):
    """p-value of the counts of `tokens` under `probability`; cells below 5 expected are joined."""
    stats = pytest.importorskip("scipy.stats")
    probability = probability.double().cpu()
    expected = len(tokens) * probability
    observed = torch.bincount(torch.tensor(tokens), minlength=len(probability)).double()
    rare = expected < 5
    cells = [(observed[~rare], expected[~rare])]
    if rare.any():
        cells.append((observed[rare].sum()[None], expected[rare].sum()[None]))
    observed, expected = (torch.cat(parts) for parts in zip(*cells, strict=True))
    return stats.chisquare(
        observed.numpy(), expected.numpy() * float(observed.sum() / expected.sum())
    ).pvalue


@pytest.mark.parametrize("known", [True, False], ids=["draft-model", "n-gram"])
def test_output_of_speculation_is_distributed_as_the_target(known, rng, device):
    """Two tokens deep, each next distribution depending on the token before; fixed seed."""
    requests, vocab = (40_000 if device.type == "cuda" else 800), 4
    first = softmax_randn(vocab, rng=rng, device=device)
    then = softmax_randn(vocab, vocab, rng=rng, device=device)
    q_first = softmax_randn(vocab, rng=rng, device=device)
    q_then = softmax_randn(vocab, vocab, rng=rng, device=device)
    if not known:  # always the same guess
        q_first = torch.nn.functional.one_hot(first.argmax(), vocab).float()
        q_then = torch.nn.functional.one_hot(then.argmax(-1), vocab).float()
    draft_1 = torch.multinomial(q_first, requests, replacement=True, generator=rng)
    draft_2 = torch.multinomial(q_then[draft_1], 1, generator=rng)[:, 0]
    drafts = torch.stack((draft_1, draft_2), 1)
    target = torch.stack((first.expand(requests, -1), then[draft_1], then[draft_2]), 1)
    draft = torch.stack((q_first.expand(requests, -1), q_then[draft_1]), 1)
    uniforms = torch.rand((requests, 3), generator=rng, device=device)
    got = verify_drafts(
        drafts, draft if known else None, target, uniforms[:, :2], uniforms[:, 2].contiguous()
    )
    rows = [
        row[: n + 1] for row, n in zip(got.tokens.tolist(), got.num_accepted.tolist(), strict=True)
    ]

    assert chi_square_p([row[0] for row in rows], first) > 0.01
    for depth in (1, 2):
        for token in range(vocab):
            nexts = [row[depth] for row in rows if len(row) > depth and row[depth - 1] == token]
            if len(nexts) > 100:
                assert chi_square_p(nexts, then[token]) > 0.001, (depth, token)

    # The test can tell: correcting a rejection by a draw from p instead of the residual is seen at
    # once.
    fresh = torch.multinomial(first, requests, replacement=True, generator=rng).tolist()
    wrong = [
        row[0] if n else other
        for row, n, other in zip(rows, got.num_accepted.tolist(), fresh, strict=True)
    ]
    assert chi_square_p(wrong, first) < 1e-4


def test_sampling_says_what_it_does_not_support(device):
    logits, one = torch.zeros((2, 5), device=device), torch.ones(2, device=device)
    with pytest.raises(ValueError, match=r"temperature: expected shape \(2\), got \(1,\)"):
        sample(logits, one[:1], one)
    with pytest.raises(ValueError, match="top_k dtype int64 is not supported; supported: int32"):
        sample(logits, one, one, top_k=torch.ones(2, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="logits dtype float64 is not supported"):
        greedy(logits.double())
    drafts = torch.zeros((2, 1), dtype=torch.int64, device=device)
    with pytest.raises(
        ValueError, match=r"target_probs: expected shape \(2, 2, \*\), got \(2, 1, 5\)"
    ):
        verify_drafts(drafts, None, logits[:, None], one[:, None], one)
