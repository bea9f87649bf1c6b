"""Speculation never changes the text: equal when greedy, equal in distribution when not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from calibrate.engine.llm import Llm
from calibrate.engine.sampling import Draws, SamplingParams, pick, probabilities, verify
from calibrate.engine.speculation import NgramProposer
from tests.real_engine import reference
from tests.real_engine.models import MODELS, weights
from tests.real_engine.test_generation import config, prompts


def noisy(arch, made):
    """A draft model that agrees with the target often, but not always."""
    draft = weights(arch)
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(draft.lm_head.shape, generator=generator) * draft.lm_head.std()
    draft.lm_head.add_(noise * 0.15)
    return arch, draft


@pytest.mark.parametrize("blocks", [65, 24])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_greedy_with_a_draft_model_equals_greedy(name, blocks):
    arch = MODELS[name]
    made = weights(arch)
    texts = prompts(6, count=5, longest=30, shared=12)
    spec = config(
        num_gpu_blocks=blocks, num_speculative_tokens=3, spec_method="draft_model",
        max_num_batched_tokens=48,
    )  # fmt: skip
    llm = Llm(arch, made, spec, draft=noisy(arch, made))
    done = llm.generate(texts, SamplingParams(max_tokens=20))
    assert [c.output for c in done] == [reference.greedy(arch, made, t, 20) for t in texts]


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_padded_admissions_reject_their_drafts(method):
    """A prompt that is cached but for one token is admitted as a verification of made-up drafts."""
    arch = MODELS["llama"]
    made = weights(arch)
    prompt = prompts(10, count=1, longest=1, shared=16)[0]
    assert len(prompt) == 17
    spec = config(num_speculative_tokens=3, spec_method=method)
    llm = Llm(arch, made, spec, draft=noisy(arch, made))
    llm.generate([prompt], SamplingParams(max_tokens=4))
    seen, run = [], llm.runner.run

    def watched(plan, recorder=None):
        seen.append(len(plan.padded))
        return run(plan, recorder)

    llm.runner.run = watched
    texts = [*prompts(11, count=1, longest=30), prompt]
    done = llm.generate(texts, SamplingParams(max_tokens=12))
    assert [c.output for c in done] == [reference.greedy(arch, made, t, 12) for t in texts]
    assert done[1].cached_tokens == 16
    assert sum(seen) == 1


def test_drafts_of_an_equal_model_are_accepted():
    arch = MODELS["llama"]
    made = weights(arch)
    spec = config(num_speculative_tokens=3, spec_method="draft_model")
    llm = Llm(arch, made, spec, draft=(arch, made))
    steps, run = 0, llm.runner.run

    def counted(plan, recorder=None):
        nonlocal steps
        steps += 1
        return run(plan, recorder)

    llm.runner.run = counted
    llm.generate(prompts(7, count=1, longest=20), SamplingParams(max_tokens=21))
    assert steps == 1 + 5  # the prompt, then four tokens a step


def test_greedy_with_ngram_equals_greedy():
    arch = MODELS["llama"]
    made = weights(arch)
    loop = prompts(8, count=1, longest=1, shared=6)[0]
    texts = [loop * 5, loop * 3 + loop[:2], *prompts(9, count=3, longest=20)]
    spec = config(num_speculative_tokens=4, spec_method="ngram")
    done = Llm(arch, made, spec).generate(texts, SamplingParams(max_tokens=30))
    assert [c.output for c in done] == [reference.greedy(arch, made, t, 30) for t in texts]


def test_ngram_proposes_what_followed_the_longest_suffix():
    lookup = NgramProposer(longest=3, shortest=1).lookup
    assert lookup([1, 2, 3, 9, 2, 3, 7, 1, 2, 3], 2) == [9, 2]
    assert lookup([5, 3, 8, 1, 3], 4) == [8, 1, 3]
    assert lookup([1, 2, 3], 2) == []


def test_verify_keeps_the_distribution_of_the_target():
    """Chi-square of two verified tokens against the target's joint distribution."""
    generator = np.random.default_rng(0)
    vocab, rounds = 5, 20_000
    target = torch.tensor(generator.dirichlet(np.ones(vocab), size=2), dtype=torch.float32)
    proposal = torch.tensor(generator.dirichlet(np.ones(vocab), size=1), dtype=torch.float32)
    draws = Draws(SamplingParams(temperature=1.0, seed=5), uid=0)
    for q in (proposal, None):
        first = np.zeros(vocab)
        second = np.zeros(vocab)
        for _ in range(rounds):
            u = torch.tensor([draws.next()], dtype=torch.float64)
            draft = int(pick(proposal, u)) if q is not None else 2
            out = verify(target, [draft], q, draws)
            first[out[0]] += 1
            if len(out) == 2:
                second[out[1]] += 1
        for counts, p in ((first, target[0]), (second, target[1])):
            expected = p.numpy().astype(float) * counts.sum()
            statistic = ((counts - expected) ** 2 / expected).sum()
            assert statistic < 23.5  # chi-square, 4 degrees of freedom, p = 1e-4


def test_sampling_follows_temperature_top_k_and_top_p():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    probs = probabilities(logits, SamplingParams(temperature=0.5))[0]
    assert torch.allclose(probs, (logits[0] / 0.5).softmax(-1))
    top2 = probabilities(logits, SamplingParams(temperature=1.0, top_k=2))[0]
    assert top2[2:].sum() == 0
    assert torch.allclose(top2[:2], logits[0, :2].softmax(-1))
    # 0.64, 0.24, 0.09, 0.03: the first two reach 0.8.
    top_p = probabilities(logits, SamplingParams(temperature=1.0, top_p=0.8))[0]
    assert torch.allclose(top_p, top2)
    u = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    picked = torch.bincount(pick(top2.expand(1000, 4), u), minlength=4) / 1000
    assert torch.allclose(picked, top2, atol=2e-3)
