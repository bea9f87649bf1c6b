"""Output tokens equal a plain full-attention forward, whatever the engine does to get them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from calibrate.engine.llm import Llm
from calibrate.engine.sampling import SamplingParams
from sim.engine.config import EngineConfig
from tests.real_engine import reference
from tests.real_engine.models import MODELS, weights


def prompts(seed: int, count: int, longest: int, shared: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    system = [rng.randrange(199) for _ in range(shared)]
    return [
        system + [rng.randrange(199) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]


def config(**settings: object) -> EngineConfig:
    defaults = {
        "max_model_len": 128, "block_size": 8, "num_gpu_blocks": 65, "max_num_seqs": 8,
        "max_num_batched_tokens": 64, "async_scheduling": False,
    }  # fmt: skip
    return EngineConfig(**{**defaults, **settings})


def test_a_long_prompt_goes_through_the_numpy_path_of_the_slots():
    arch = MODELS["qwen3"]
    made = weights(arch)
    prompt = prompts(9, count=1, longest=1, shared=99)[0]
    for budget in (256, 40):
        llm = Llm(arch, made, config(max_num_batched_tokens=budget))
        assert llm.generate([prompt], SamplingParams(max_tokens=4))[0].output == (
            reference.greedy(arch, made, prompt, 4)
        )


@pytest.mark.parametrize("name", MODELS)
def test_output_equals_plain_forward(name):
    arch = MODELS[name]
    made = weights(arch)
    llm = Llm(arch, made, config(sliding_window=arch.shape.sliding_window))
    texts = prompts(1, count=6, longest=40)
    done = llm.generate(texts, SamplingParams(max_tokens=10))
    for prompt, completion in zip(texts, done, strict=True):
        assert completion.output == reference.greedy(arch, made, prompt, 10)
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral"])
def test_output_does_not_depend_on_chunks_preemption_or_cache(name):
    arch = MODELS[name]
    made = weights(arch)
    window = arch.shape.sliding_window
    texts = prompts(2, count=10, longest=30, shared=19)
    wanted = [reference.greedy(arch, made, text, 24) for text in texts]
    # 10 texts of up to 73 tokens in 22 blocks of 8: they preempt each other.
    llm = Llm(arch, made, config(
        num_gpu_blocks=23, max_num_batched_tokens=16, max_num_seqs=6, sliding_window=window,
    ))  # fmt: skip
    done = llm.generate(texts, SamplingParams(max_tokens=24))
    assert [c.output for c in done] == wanted
    if window is None:
        assert sum(c.preemptions for c in done) > 0
        assert sum(c.cached_tokens for c in done) > 0
    llm.scheduler.check_integrity()


def test_shared_prefix_is_served_from_the_cache():
    arch = MODELS["llama"]
    made = weights(arch)
    llm = Llm(arch, made, config())
    prompt = prompts(3, count=1, longest=1, shared=40)[0]
    first = llm.generate([prompt], SamplingParams(max_tokens=8))[0]
    again = llm.generate([prompt], SamplingParams(max_tokens=8))[0]
    assert (first.cached_tokens, again.cached_tokens) == (0, 40)
    assert first.output == again.output == reference.greedy(arch, made, prompt, 8)


def test_generation_stops_at_eos_stop_tokens_and_strings():
    arch = MODELS["llama"]
    made = weights(arch)
    prompt = prompts(4, count=1, longest=20)[0]
    full = reference.greedy(arch, made, prompt, 12)
    ends = full[5]
    first = full.index(ends) + 1
    llm = Llm(arch, made, config(), detokenize=lambda ids: "".join(f"<{i}>" for i in ids))

    stopped = llm.generate([prompt], SamplingParams(max_tokens=12, stop_token_ids=(ends,)))[0]
    assert (stopped.output, stopped.finish_reason) == (full[:first], f"token {ends}")

    text = f"{full[2]}><{full[3]}"
    stopped = llm.generate([prompt], SamplingParams(max_tokens=12, stop=(text,)))[0]
    assert (stopped.output, stopped.finish_reason) == (full[:4], f"string {text!r}")

    with_eos = Llm(replace(arch, eos=(ends,)), made, config())
    assert with_eos.generate([prompt], SamplingParams(max_tokens=12))[0].output == full[:first]
    ignoring = SamplingParams(max_tokens=12, ignore_eos=True)
    assert with_eos.generate([prompt], ignoring)[0].output == full


def test_generation_is_cut_at_max_model_len():
    arch = MODELS["llama"]
    llm = Llm(arch, weights(arch), config(max_model_len=32))
    done = llm.generate([list(range(25))], SamplingParams(max_tokens=50))[0]
    assert len(done.output) == 7


def test_sampled_output_does_not_depend_on_the_batch():
    arch = MODELS["llama"]
    made = weights(arch)
    texts = prompts(5, count=6, longest=20)
    params = [
        SamplingParams(temperature=0.8, top_k=k, top_p=p, seed=7, max_tokens=8)
        for k, p in ((0, 1.0), (20, 1.0), (0, 0.9), (50, 0.8), (1, 1.0), (0, 1.0))
    ]
    together = Llm(arch, made, config()).generate(texts, params)
    one_by_one = Llm(arch, made, config(max_num_seqs=1)).generate(texts, params)
    assert [c.output for c in together] == [c.output for c in one_by_one]
    assert together[4].output == reference.greedy(arch, made, texts[4], 8)
