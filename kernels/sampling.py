"""Choosing the next token: greedy, temperature, top-k, top-p, without sorting the vocabulary.

Both cuts are thresholds on the logit: keep every token at or above it. The threshold is found digit
by digit in the order-preserving integer image of a float, one pass over the row per digit, counting
(top-k) or weighing (top-p) the tokens at or above a few candidates at a time; this is radix
selection. Tokens that tie with the last one kept are kept as well, so the result does not depend on
an order among equals.

Random numbers are passed in, one uniform per row: the token is where the running sum over the
vocabulary passes it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import runtime

BITS = 2  # digits of the search: 2**BITS candidates a pass, 32 / BITS passes
BLOCK = 1024


@triton.jit
def _order_key(x):
    """fp32 -> uint32 whose order is the float's."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _threshold(
    p_row,
    vocab,
    inverse_t,
    x_max,
    floor,
    target,
    MASS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest key at or above which lie `target` tokens, or with MASS `target` of the weight
    exp(x - max).

    Tokens below the key `floor` count for nothing. If even all of them fall short, through
    rounding, the answer is 0.
    """
    o_c = tl.arange(0, 2**BITS)
    key = tl.zeros([1], tl.uint32)
    shift = tl.full([], 32, tl.uint32)
    for _ in range(0, 32 // BITS):
        shift = (shift - BITS).to(tl.uint32)
        b_candidate = key + (o_c.to(tl.uint32) << shift)
        b_sum = tl.zeros([2**BITS, BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            o_v = start + tl.arange(0, BLOCK)
            b_x = tl.load(p_row + o_v, mask=o_v < vocab, other=float("-inf")).to(tl.float32)
            b_key = _order_key(b_x)
            if MASS:
                b_w = tl.exp((b_x - x_max) * inverse_t)
            else:
                b_w = tl.full([BLOCK], 1.0, tl.float32)
            b_w = tl.where((b_key >= floor) & (o_v < vocab), b_w, 0.0)
            b_sum += tl.where(b_key[None, :] >= b_candidate[:, None], b_w[None, :], 0.0)
        b_total = tl.sum(b_sum, 1)
        enough = (b_total >= target) & (b_total > 0.0)
        digit = tl.max(tl.where(enough, o_c, 0), 0)
        key = key + (digit.to(tl.uint32) << shift)
    return tl.max(key, 0)


@triton.jit
def _mass(p_row, vocab, inverse_t, x_max, floor, BLOCK: tl.constexpr):
    """Total weight of the tokens at or above `floor`."""
    b_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_x = tl.load(p_row + o_v, mask=o_v < vocab, other=float("-inf")).to(tl.float32)
        b_sum += tl.where(
            (_order_key(b_x) >= floor) & (o_v < vocab), tl.exp((b_x - x_max) * inverse_t), 0.0
        )
    return tl.sum(b_sum, 0)


@triton.jit
def _best(p_row, vocab, BLOCK: tl.constexpr):
    """(largest logit, its first index)."""
    b_best = tl.full([BLOCK], float("-inf"), tl.float32)
    b_index = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_x = tl.load(p_row + o_v, mask=o_v < vocab, other=float("-inf")).to(tl.float32)
        b_index = tl.where(b_x > b_best, o_v, b_index)
        b_best = tl.maximum(b_x, b_best)
    x_max = tl.max(b_best, 0)
    return x_max, tl.min(tl.where(b_best == x_max, b_index, 2147483647), 0)


@triton.jit
def _floor(
    p_row, vocab, inverse_t, x_max, TopK, TopP, i_row,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The key at or above which tokens stay, after top-k and then top-p."""
    floor = tl.full([], 0, tl.uint32)
    if HAS_TOP_K:
        top_k = tl.load(TopK + i_row)
        if (top_k > 0) & (top_k < vocab):
            floor = _threshold(
                p_row, vocab, inverse_t, x_max, floor, top_k.to(tl.float32), False, BITS, BLOCK
            )
    if HAS_TOP_P:
        top_p = tl.load(TopP + i_row)
        if top_p < 1.0:
            target = top_p * _mass(p_row, vocab, inverse_t, x_max, floor, BLOCK)
            cut = _threshold(p_row, vocab, inverse_t, x_max, floor, target, True, BITS, BLOCK)
            floor = tl.maximum(floor, cut)
    return floor


@triton.jit
def _sample_kernel(
    Logits, Temperature, TopK, TopP, Uniforms, Tokens, vocab, s_logits,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0)
    p_row = Logits + i_row.to(tl.int64) * s_logits
    x_max, best = _best(p_row, vocab, BLOCK)
    temperature = tl.load(Temperature + i_row)
    if temperature == 0.0:
        tl.store(Tokens + i_row, best.to(tl.int64))
        return
    inverse_t = 1.0 / temperature
    floor = _floor(
        p_row, vocab, inverse_t, x_max, TopK, TopP, i_row, HAS_TOP_K, HAS_TOP_P, BITS, BLOCK
    )
    target = tl.load(Uniforms + i_row) * _mass(p_row, vocab, inverse_t, x_max, floor, BLOCK)
    passed = tl.full([BLOCK], 2147483647, tl.int32)  # where the running sum has passed the target
    last = tl.full(
        [BLOCK], 0, tl.int32
    )  # the last token kept, should rounding hold the sum below the target
    before = 0.0
    for start in range(0, vocab, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_x = tl.load(p_row + o_v, mask=o_v < vocab, other=float("-inf")).to(tl.float32)
        b_w = tl.exp((b_x - x_max) * inverse_t)
        keep = (_order_key(b_x) >= floor) & (o_v < vocab) & (b_w > 0.0)
        b_w = tl.where(keep, b_w, 0.0)
        b_sum = before + tl.cumsum(b_w, 0)
        passed = tl.minimum(passed, tl.where(keep & (b_sum > target), o_v, 2147483647))
        last = tl.maximum(last, tl.where(keep, o_v, 0))
        before += tl.sum(b_w, 0)
    tl.store(Tokens + i_row, tl.minimum(tl.min(passed, 0), tl.max(last, 0)).to(tl.int64))


@triton.jit
def _probabilities_kernel(
    Logits, Temperature, TopK, TopP, Out, vocab, s_logits, s_out,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0)
    p_row = Logits + i_row.to(tl.int64) * s_logits
    p_out = Out + i_row.to(tl.int64) * s_out
    x_max, best = _best(p_row, vocab, BLOCK)
    temperature = tl.load(Temperature + i_row)
    greedy = temperature == 0.0
    inverse_t = 1.0 / tl.where(greedy, 1.0, temperature)
    floor = _floor(
        p_row, vocab, inverse_t, x_max, TopK, TopP, i_row, HAS_TOP_K, HAS_TOP_P, BITS, BLOCK
    )
    total = _mass(p_row, vocab, inverse_t, x_max, floor, BLOCK)
    for start in range(0, vocab, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_x = tl.load(p_row + o_v, mask=o_v < vocab, other=float("-inf")).to(tl.float32)
        b_p = tl.where(_order_key(b_x) >= floor, tl.exp((b_x - x_max) * inverse_t) / total, 0.0)
        b_p = tl.where(greedy, (o_v == best).to(tl.float32), b_p)
        tl.store(p_out + o_v, b_p, mask=o_v < vocab)


@triton.jit
def _greedy_kernel(Logits, Tokens, vocab, s_logits, BLOCK: tl.constexpr):
    i_row = tl.program_id(0)
    _, best = _best(Logits + i_row.to(tl.int64) * s_logits, vocab, BLOCK)
    tl.store(Tokens + i_row, best.to(tl.int64))


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The first index of each row's largest logit: [rows, vocab] -> [rows] int64."""
    rows, vocab = _rows(logits)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    runtime.launch(
        _greedy_kernel, (rows,), logits, tokens, vocab, logits.stride(0), BLOCK=4096, num_warps=8
    )
    return tokens


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """A token per row, [rows] int64, from softmax(logits / temperature) cut by top-k, then by
    top-p.

    logits       [rows, vocab] fp32, fp16 or bf16; -inf forbids a token; NaN is not supported.
    temperature  [rows] fp32, >= 0; 0 takes the largest logit.
    uniforms     [rows] fp32 in [0, 1): the same number gives the same token.
    top_k        [rows] int32: keep the k largest logits, and their equals; <= 0 or >= vocab keeps
                 all.
    top_p        [rows] fp32: of what top-k kept, keep the fewest largest with at least this share
                 of the probability (nucleus sampling, Holtzman et al. 2020), and their equals, at
                 least one; >= 1 keeps all.
    """
    rows, vocab = _rows(logits)
    _check(rows, temperature=temperature, uniforms=uniforms, top_k=top_k, top_p=top_p)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    runtime.launch(
        _sample_kernel, (rows,), logits, temperature, top_k, top_p, uniforms, tokens, vocab,
        logits.stride(0),
        HAS_TOP_K=top_k is not None, HAS_TOP_P=top_p is not None, BITS=BITS, BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip
    return tokens


def probabilities(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """The distribution `sample` draws from, [rows, vocab] fp32; `verify_drafts` compares them."""
    rows, vocab = _rows(logits)
    _check(rows, temperature=temperature, top_k=top_k, top_p=top_p)
    out = logits.new_empty((rows, vocab), dtype=torch.float32)
    runtime.launch(
        _probabilities_kernel, (rows,),
        logits, temperature, top_k, top_p, out, vocab, logits.stride(0), out.stride(0),
        HAS_TOP_K=top_k is not None, HAS_TOP_P=top_p is not None, BITS=BITS, BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip
    return out


def _rows(logits: torch.Tensor) -> tuple[int, int]:
    runtime.expect_shape("logits", logits, None, None)
    runtime.one_of("logits dtype", logits.dtype, runtime.FLOAT_TYPES)
    runtime.unit_stride("logits", logits)
    return logits.shape[0], logits.shape[1]


def _check(rows: int, **parameters: torch.Tensor | None) -> None:
    for name, tensor in parameters.items():
        if tensor is not None:
            runtime.expect_shape(name, tensor, rows)
            runtime.one_of(
                f"{name} dtype",
                tensor.dtype,
                (torch.int32,) if name == "top_k" else (torch.float32,),
            )


def probabilities_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same by sorting, in float64."""
    out = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    for i, row in enumerate(logits.to(torch.float64)):
        t = float(temperature[i])
        if t == 0.0:
            out[i, row.argmax()] = 1.0
            continue
        row = row.clone()
        k = 0 if top_k is None else int(top_k[i])
        if 0 < k < row.numel():
            row[row < row.sort(descending=True).values[k - 1]] = float("-inf")
        probability = (row / t).softmax(-1)
        if top_p is not None and float(top_p[i]) < 1.0:
            values = probability.sort(descending=True).values
            short = int((values.cumsum(-1) < float(top_p[i])).sum())
            probability[probability < values[min(short, values.numel() - 1)]] = 0.0
            probability /= probability.sum()
        out[i] = probability
    return out


def sample_reference(probability: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token where the running sum of each row passes its uniform; [rows] int64."""
    target = uniforms.to(torch.float64)[:, None] * probability.sum(-1, keepdim=True)
    return ((probability.cumsum(-1) > target) & (probability > 0)).to(torch.int32).argmax(-1)
