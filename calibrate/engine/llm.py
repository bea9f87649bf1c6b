"""Generating text with the real engine: the scheduler's loop without a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from calibrate.engine.architecture import Architecture, architecture
from calibrate.engine.checkpoint import load_weights
from calibrate.engine.decoder import Decoder, Model
from calibrate.engine.device import free_bytes, ops_for, pick_device
from calibrate.engine.runner import ModelRunner, StepTokens
from calibrate.engine.sampling import SamplingParams
from calibrate.engine.speculation import DraftModel, NgramProposer, Proposer
from calibrate.engine.stops import Detokenize
from calibrate.engine.tokens import TextTokens, TokenSource, text_segments
from calibrate.engine.weights import DTYPES, Weights, random_weights
from sim.engine.config import EngineConfig
from sim.engine.plan import StepPlan
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence as Seq
from sim.errors import UserError, unknown
from sim.request import Request


@dataclass(frozen=True)
class Completion:
    """What became of one prompt."""

    prompt: list[int]
    output: list[int]
    finish_reason: str
    """`length`, or the stop: `token 2`, `string 'END'`."""
    cached_tokens: int
    """Prefix-cache hit at its first admission."""
    preemptions: int


def load_model(
    name: str,
    *,
    device: torch.device | str = "cpu",
    dtype: str = "bf16",
    seed: int = 0,
    random: bool | None = None,
) -> tuple[Architecture, Weights]:
    """A built-in model with random weights, or a model folder with its own.

    `random` True takes random weights for a folder as well (only its config.json is read).
    """
    return load_weights_of(
        name, architecture(name), device=device, dtype=dtype, seed=seed, random=random
    )


def load_weights_of(
    name: str,
    arch: Architecture,
    *,
    device: torch.device | str = "cpu",
    dtype: str = "bf16",
    seed: int = 0,
    random: bool | None = None,
) -> tuple[Architecture, Weights]:
    """The same for an architecture that is known already. UserError when the weights do not fit."""
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    check_fits(arch, dtype, torch.device(device))
    folder = Path(name)
    if folder.is_dir() and not random:
        return arch, load_weights(folder, arch, dtype=DTYPES[dtype], device=device)
    return arch, random_weights(arch, seed=seed, dtype=DTYPES[dtype], device=device)


def check_fits(arch: Architecture, dtype: str, device: torch.device) -> None:
    """UserError when the weights are larger than the device's free memory."""
    needed = arch.shape.num_params * DTYPES[dtype].itemsize
    free = free_bytes(device)
    if needed > free:
        raise UserError(
            f"{arch.shape.name} has {needed / 1e9:.1f} GB of weights in {dtype}, {device} has "
            f"{free / 1e9:.1f} GB free; choose a smaller model"
        )


def make_runner(
    arch: Architecture,
    weights: Weights,
    config: EngineConfig,
    tokens: TokenSource,
    *,
    draft: tuple[Architecture, Weights] | None = None,
    **runner_options: object,
) -> ModelRunner:
    """A runner with the KV cache that `config` asks for, and its proposer of drafts."""
    decoder: Model = make_decoder(arch, weights, config)
    sizes = [n for n in config.capture_sizes() if n <= config.max_num_seqs]
    if weights.device.type == "cuda" and sizes:
        from calibrate.engine.graphs import GraphedDecoder

        decoder = GraphedDecoder(decoder, sizes, config.max_model_len)
    proposer: Proposer | None = None
    if config.speculative:
        if config.spec_method == "ngram":
            proposer = NgramProposer()
        elif config.spec_method == "draft_model":
            if draft is None:
                raise UserError(
                    "spec_method draft_model needs a draft model: set execute.draft_model"
                )
            proposer = DraftModel(make_decoder(*draft, config))
        else:
            raise unknown("speculative method of the real engine", config.spec_method,
                          ("ngram", "draft_model"))  # fmt: skip
    return ModelRunner(
        decoder,
        tokens,
        proposer=proposer,
        num_drafts=config.num_speculative_tokens,
        **runner_options,  # type: ignore[arg-type]
    )


def make_decoder(arch: Architecture, weights: Weights, config: EngineConfig) -> Decoder:
    """The decoder with a KV cache of `config.num_blocks` blocks. UserError when it does not fit."""
    shape = arch.shape
    if config.sliding_window != shape.sliding_window:
        arch = replace(arch, shape=replace(shape, sliding_window=config.sliding_window))
    width = weights.embedding.element_size()
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * width
    needed = config.num_blocks * config.block_size * per_token
    free = free_bytes(weights.device)
    if needed > free:
        raise UserError(
            f"{config.num_blocks} KV blocks of {shape.name} take {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free on {weights.device}; set a smaller "
            f"engine.num_gpu_blocks"
        )
    return Decoder(
        arch,
        weights,
        ops_for(weights.device),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        # Drafts may reach past the longest context.
        max_positions=config.max_model_len + config.num_speculative_tokens + 1,
    )


class Llm:
    """A model that completes prompts of token ids, batched by vLLM's scheduler.

    Example: `Llm.load("folder").generate([[1, 2, 3]], SamplingParams(max_tokens=8))`.
    """

    def __init__(
        self,
        arch: Architecture,
        weights: Weights,
        config: EngineConfig | None = None,
        *,
        draft: tuple[Architecture, Weights] | None = None,
        detokenize: Detokenize | None = None,
    ) -> None:
        """`config.async_scheduling` is ignored: steps run one after the other."""
        self.arch = arch
        config = config or EngineConfig(max_model_len=min(arch.shape.context, 4096))
        if config.num_gpu_blocks is None:
            blocks = config.max_num_seqs * config.max_model_len // config.block_size
            config = config.with_blocks(min(blocks, 4096) + 1)
        self.config = replace(config, async_scheduling=False)
        self.scheduler = Scheduler(self.config)
        self._params: dict[Seq, SamplingParams] = {}
        self.runner = make_runner(
            arch,
            weights,
            self.config,
            TextTokens(),
            draft=draft,
            params_of=self._params.__getitem__,
            eos=arch.eos,
            detokenize=detokenize,
        )
        self._next_uid = 0

    @classmethod
    def load(
        cls,
        name: str,
        config: EngineConfig | None = None,
        *,
        device: str = "cpu",
        dtype: str = "bf16",
        detokenize: Detokenize | None = None,
    ) -> Llm:
        """A model folder, or a built-in name with random weights."""
        arch, weights = load_model(name, device=pick_device(device), dtype=dtype)
        return cls(arch, weights, config, detokenize=detokenize)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete all prompts; results in their order. UserError for a prompt that cannot fit."""
        each = [params or SamplingParams()] if not isinstance(params, Sequence) else list(params)
        each = each * len(prompts) if len(each) == 1 else each
        if len(each) != len(prompts):
            raise UserError(f"{len(prompts)} prompts and {len(each)} sampling parameters")
        seqs = [self._add(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        done: dict[Seq, Completion] = {}
        cached: dict[Seq, int] = {}
        while len(done) < len(seqs):
            for seq in self.step(cached):
                text = self.runner.text(seq)
                output = text.output[: seq.num_output_tokens]
                done[seq] = Completion(
                    prompt=text.known[: text.num_prompt],
                    output=output,
                    finish_reason=text.why if text.end == len(output) else "length",
                    cached_tokens=cached[seq],
                    preemptions=seq.num_preemptions,
                )
                self.runner.forget(seq)
                del self._params[seq]
        return [done[seq] for seq in seqs]

    def step(self, cached: dict[Seq, int] | None = None) -> list[Seq]:
        """One step of the engine; the sequences that finished. `cached` gets the prefix hits."""
        plan = self.scheduler.schedule()
        for i in range(plan.num_running, len(plan.seqs)):
            if cached is not None:
                cached.setdefault(plan.seqs[i], plan.num_computed[i])
        if not plan:
            return []
        result = self.runner.run(plan)
        return commit(self.scheduler, plan, result)

    def _add(self, prompt: Sequence[int], params: SamplingParams) -> Seq:
        vocab, config = self.arch.shape.vocab, self.config
        if not prompt:
            raise UserError("a prompt must have at least one token")
        wrong = next((t for t in prompt if not 0 <= t < vocab), None)
        if wrong is not None:
            raise UserError(f"token {wrong} is outside the vocabulary of {vocab}")
        if len(prompt) + 1 > config.max_model_len:
            raise UserError(
                f"a prompt of {len(prompt)} tokens does not fit max_model_len "
                f"{config.max_model_len}"
            )
        longest = min(len(prompt) + params.max_tokens, config.max_model_len)
        if -(-longest // config.block_size) > config.num_usable_blocks:
            raise UserError(
                f"a prompt of {len(prompt)} tokens with {params.max_tokens} more does not fit "
                f"{config.num_usable_blocks} KV blocks of {config.block_size}"
            )
        request = Request(
            uid=self._next_uid,
            id=str(self._next_uid),
            arrival_ns=self._next_uid,
            prompt_tokens=len(prompt),
            output_tokens=params.max_tokens,
            segments=text_segments(prompt),
        )
        self._next_uid += 1
        seq = Seq(request)
        self._params[seq] = params
        self.scheduler.add(seq)
        return seq


def commit(scheduler: Scheduler, plan: StepPlan, result: StepTokens) -> list[Seq]:
    """Tell the scheduler what a step produced; the sequences that finished."""
    for seq, end in result.ended.items():
        seq.stop_after = min(seq.stop_after, end)
    updated = scheduler.update(plan, [len(new) for new in result.new])
    if scheduler.config.speculative:
        scheduler.update_drafts(plan, result.num_drafts)
    return updated.finished
