"""The engine's settings: defaults by GPU as in vLLM 0.33.0, and what is refused."""

import pytest

from sim.engine.config import GIB, EngineConfig, batch_defaults
from sim.errors import UserError


@pytest.mark.parametrize(
    ("gpu", "memory_gib", "tokens", "seqs"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, 8192, 1024),
        ("NVIDIA H200", 139.8, 8192, 1024),
        ("NVIDIA B200", 178.4, 16384, 1024),
        ("NVIDIA A100-SXM4-80GB", 79.2, 2048, 256),
        ("NVIDIA L40S", 44.4, 2048, 256),
        ("NVIDIA GeForce RTX 4090", 23.5, 2048, 256),
        ("NVIDIA GB10", 119.7, 2048, 256),
    ],
)
def test_batch_defaults_follow_gpu_memory_and_name(gpu, memory_gib, tokens, seqs):
    assert batch_defaults(gpu, memory_gib * GIB) == (tokens, seqs)
    config = EngineConfig.for_gpu(gpu, memory_gib * GIB, 32768)
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (tokens, seqs)


def test_given_settings_win_over_defaults():
    config = EngineConfig.for_gpu("H100", 80 * GIB, 32768, {"max_num_seqs": 7, "watermark": 0.1})
    assert config.max_num_seqs == 7
    assert config.watermark == 0.1
    assert config.max_num_batched_tokens == 8192


def test_defaults_adapt_to_one_another():
    # A step without chunking must hold the longest prompt; a small budget limits the slots.
    config = EngineConfig.for_gpu("L4", 22 * GIB, 16000, {"enable_chunked_prefill": False})
    assert config.max_num_batched_tokens == 16000
    config = EngineConfig.for_gpu("L4", 22 * GIB, 16000, {"max_num_batched_tokens": 64})
    assert config.max_num_seqs == 64
    config = EngineConfig.for_gpu("L4", 22 * GIB, 64, {"max_num_seqs": 2})
    assert config.max_num_batched_tokens == 128


def test_cuda_graph_sizes_are_vllms():
    config = EngineConfig(max_num_seqs=256, max_num_batched_tokens=8192)
    sizes = config.capture_sizes()
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes[-1] == 512
    assert len(sizes) == 3 + 31 + 17
    assert EngineConfig(enforce_eager=True).capture_sizes() == ()
    few = EngineConfig(max_num_seqs=10, max_num_batched_tokens=8192).capture_sizes()
    assert few == (1, 2, 4, 8, 10, 16)
    own = EngineConfig(cudagraph_capture_sizes=(8, 1, 4096, 8)).capture_sizes()
    assert own == (1, 8)
    verify = EngineConfig(max_num_seqs=4, num_speculative_tokens=2).capture_sizes()
    assert {3, 6, 12} <= set(verify)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_model_len": 10**30}, "max_model_len must be at most 2147483647"),
        ({"num_gpu_blocks": 10**30}, "num_gpu_blocks must be at least 2 .* at most 2147483647"),
        ({"num_speculative_tokens": 10_000}, "num_speculative_tokens must be at most 1024"),
        ({"cudagraph_capture_sizes": (8, 0)}, "cudagraph_capture_sizes must be at least 1, got 0"),
        ({"max_num_seqs": 4096}, "max_num_seqs"),
        ({"enable_chunked_prefill": False, "max_model_len": 9000}, "max_model_len"),
        ({"max_num_active_seqs": 300}, "max_num_active_seqs"),
        ({"long_prefill_token_threshold": 5000}, "long_prefill_token_threshold"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"watermark": 1.0}, "watermark"),
        ({"num_gpu_blocks": 1}, "num_gpu_blocks"),
        ({"policy": "fcsf"}, "did you mean 'fcfs'"),
        ({"kv_cache_dtype": "fp9"}, "kv_cache_dtype"),
        ({"num_speculative_tokens": 3, "spec_method": "eagel"}, "did you mean 'eagle'"),
        (
            {
                "num_speculative_tokens": 300,
                "spec_method": "eagle",
                "max_num_batched_tokens": 300,
            },
            "lookahead",
        ),
    ],
)
def test_what_vllm_refuses_is_a_user_error(settings, complaint):
    with pytest.raises(UserError, match=complaint):
        EngineConfig(**settings)


def test_unknown_setting_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'max_num_seqs'"):
        EngineConfig.for_gpu("H100", 80 * GIB, 4096, {"max_num_sequences": 3})


def test_the_setting_that_was_given_is_blamed():
    with pytest.raises(UserError, match="max_num_seqs must be at least 1, got -1"):
        EngineConfig.for_gpu("A100", 80 * GIB, 4096, {"max_num_seqs": -1})


def test_blocks_must_be_known_to_run():
    with pytest.raises(UserError, match="num_gpu_blocks is not set"):
        _ = EngineConfig().num_blocks
    assert EngineConfig().with_blocks(11).num_usable_blocks == 10
