"""The engine with the Triton kernels (interpreted without a GPU), and decode steps as graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from calibrate.engine.decoder import Decoder
from calibrate.engine.graphs import GraphedDecoder
from calibrate.engine.llm import Llm
from calibrate.engine.runner import ModelRunner
from calibrate.engine.sampling import SamplingParams
from calibrate.engine.torch_ops import TorchOps
from calibrate.engine.weights import random_weights
from tests.real_engine import reference
from tests.real_engine.models import MODELS, weights
from tests.real_engine.test_generation import config, prompts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def with_triton(name: str, **settings: object):
    """A model whose heads the kernels support, on them."""
    from calibrate.engine.triton_ops import TritonOps

    arch = MODELS[name]
    arch = replace(arch, shape=replace(arch.shape, head_dim=64, layers=1))
    made = weights(arch)
    on_device = random_weights(arch, seed=1, dtype=torch.float32)
    if DEVICE == "cuda":
        on_device = random_weights(arch, seed=1, dtype=torch.float32, device=DEVICE)
        made = on_device
    llm = Llm(arch, on_device, config(sliding_window=arch.shape.sliding_window,
                                      enforce_eager=True, **settings))  # fmt: skip
    llm.runner.decoder.ops = TritonOps()
    return arch, made, llm


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "mixtral"])
def test_triton_kernels_give_the_plain_forward(name):
    if DEVICE == "cuda":
        pytest.skip("the reference runs on the CPU; gpu_check compares devices")
    arch, made, llm = with_triton(name, max_num_batched_tokens=24)
    texts = prompts(11, count=2, longest=20, shared=9)
    done = llm.generate(texts, SamplingParams(max_tokens=4))
    assert [c.output for c in done] == [reference.greedy(arch, made, t, 4) for t in texts]


def test_triton_kernels_verify_drafts():
    arch, made, _ = with_triton("llama")
    from calibrate.engine.triton_ops import TritonOps

    spec = config(num_speculative_tokens=2, spec_method="ngram", enforce_eager=True)
    llm = Llm(arch, made, spec)
    llm.runner.decoder.ops = TritonOps()
    text = [5, 6, 7, 5, 6, 7, 5, 6]
    done = llm.generate([text], SamplingParams(max_tokens=5))
    assert done[0].output == reference.greedy(arch, made, text, 5)


def test_graphs_pad_decodes_and_leave_everything_else_alone():
    """With a stand-in for CUDA graphs: the work is simply done again on the same tensors."""
    arch, made, llm = with_triton("llama", num_gpu_blocks=40)
    captured, replayed = [], []

    def capture(work):
        work()
        captured.append(1)

        def replay():
            work()
            replayed.append(1)

        return replay

    runner: ModelRunner = llm.runner
    runner.decoder = GraphedDecoder(runner.decoder, (1, 4), 128, capture)
    assert len(captured) == 2
    texts = prompts(12, count=3, longest=12)
    done = llm.generate(texts, SamplingParams(max_tokens=4))
    assert [c.output for c in done] == [reference.greedy(arch, made, t, 4) for t in texts]
    assert len(replayed) == 3


def test_graph_sizes():
    from calibrate.engine.batch import Entry, make_batch

    arch = MODELS["llama"]
    decoder = Decoder(arch, weights(arch), TorchOps(), num_blocks=9, block_size=8, max_positions=64)
    graphed = GraphedDecoder.__new__(GraphedDecoder)
    graphed._sizes = [1, 2, 4]
    one = Entry([1], 5, [1], 1)

    def size(*entries: Entry) -> int | None:
        return graphed.size_for(make_batch(entries, decoder.block_size, torch.device("cpu")))

    assert [size(one), size(one, one), size(*[one] * 3), size(*[one] * 5)] == [1, 2, 4, None]
    assert size(one, Entry([1, 2], 0, [1], 1)) is None
    assert size(Entry([1, 2], 5, [1], 2)) is None
