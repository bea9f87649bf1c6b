"""Mixture-of-experts routing: a token's experts, their weights, the router's losses as values."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import runtime

MAX_EXPERTS = 512
MAX_TOP_K = 16


class Routing(NamedTuple):
    """Where tokens go, most probable expert first."""

    weights: torch.Tensor  # [tokens, top_k] fp32
    experts: torch.Tensor  # [tokens, top_k] int32
    z_loss: (
        torch.Tensor | None
    )  # scalar fp32: mean squared log-sum-exp of the logits (ST-MoE, Zoph et al. 2022, eq. 5)
    balance_loss: (
        torch.Tensor | None
    )  # scalar fp32: experts * sum(f * p) (Switch, Fedus et al. 2021, eq. 4); uniform = 1


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    Logits, Noise, NoiseLogits, Weights, Experts, PartZ, PartProb, PartCount,
    num_tokens, s_logits, s_noise, s_noise_logits,
    NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, NOISY: tl.constexpr, RENORMALIZE: tl.constexpr, LOSSES: tl.constexpr,
):  # fmt: skip
    i_block = tl.program_id(0)
    o_t = i_block * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.arange(0, EXPERTS_PAD)
    o_k = tl.arange(0, K_PAD)
    m_t = o_t < num_tokens
    m_e = o_e < NUM_EXPERTS
    mask = m_t[:, None] & m_e[None, :]
    o_row = o_t.to(tl.int64)[:, None]
    # [BLOCK_T, EXPERTS_PAD]
    b_x = tl.load(Logits + o_row * s_logits + o_e[None, :], mask=mask, other=0.0).to(tl.float32)
    if NOISY:
        b_n = tl.load(Noise + o_row * s_noise + o_e[None, :], mask=mask, other=0.0).to(tl.float32)
        b_s = tl.load(NoiseLogits + o_row * s_noise_logits + o_e[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        b_x += b_n * (
            tl.maximum(b_s, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(b_s)))
        )  # softplus, without overflow
    b_x = tl.where(m_e[None, :], b_x, float("-inf"))
    b_max = tl.max(b_x, 1)
    b_exp = tl.exp(b_x - b_max[:, None])
    b_sum = tl.sum(b_exp, 1)

    b_left = b_x
    b_w = tl.zeros([BLOCK_T, K_PAD], tl.float32)
    b_id = tl.zeros([BLOCK_T, K_PAD], tl.int32)
    b_count = tl.zeros([EXPERTS_PAD], tl.int32)
    for j in tl.static_range(TOP_K):
        b_best = tl.max(b_left, 1)
        b_arg = tl.argmax(b_left, 1)  # of equal logits the lowest expert
        chosen = o_e[None, :] == b_arg[:, None]
        b_left = tl.where(chosen, float("-inf"), b_left)
        b_w = tl.where(o_k[None, :] == j, (tl.exp(b_best - b_max) / b_sum)[:, None], b_w)
        b_id = tl.where(o_k[None, :] == j, b_arg[:, None].to(tl.int32), b_id)
        if LOSSES:
            b_count += tl.sum((chosen & m_t[:, None]).to(tl.int32), 0)
    if RENORMALIZE:
        b_w = b_w / tl.sum(b_w, 1)[:, None]
    o_out = o_row * TOP_K + o_k[None, :]
    m_out = m_t[:, None] & (o_k < TOP_K)[None, :]
    tl.store(Weights + o_out, b_w, mask=m_out)
    tl.store(Experts + o_out, b_id, mask=m_out)
    if LOSSES:
        b_lse = tl.where(m_t, b_max + tl.log(b_sum), 0.0)
        tl.store(PartZ + i_block, tl.sum(b_lse * b_lse, 0))
        b_prob = tl.where(mask, b_exp / b_sum[:, None], 0.0)
        tl.store(PartProb + i_block * NUM_EXPERTS + o_e, tl.sum(b_prob, 0), mask=m_e)
        tl.store(PartCount + i_block * NUM_EXPERTS + o_e, b_count, mask=m_e)


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    method: str = "softmax",
    renormalize: bool = True,
    noise: torch.Tensor | None = None,
    noise_logits: torch.Tensor | None = None,
    losses: bool = False,
) -> Routing:
    """Choose `top_k` experts per token from router logits [tokens, experts], up to 512 experts and
    top 16.

    method  softmax  the top_k probabilities; with renormalize they sum to 1 per token (Mixtral),
            else not (Qwen-MoE) noisy    logits + noise * softplus(noise_logits) first, then as
            softmax (Shazeer et al. 2017, eq. 3-5);
                     `noise` holds standard normals, both are [tokens, experts]
            switch   the best expert, weighted by its probability (Fedus et al. 2021); top_k 1,
                     never renormalised
    losses  also return z_loss and balance_loss, of the (noisy) logits; f counts each of the top_k
            choices as 1 / top_k.
    """
    runtime.one_of("method", method, ("softmax", "noisy", "switch"))
    runtime.one_of("logits dtype", logits.dtype, runtime.FLOAT_TYPES)
    runtime.expect_shape("logits", logits, None, None)
    runtime.unit_stride("logits", logits)
    num_tokens, num_experts = logits.shape
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"{num_experts} experts are not supported; supported: up to {MAX_EXPERTS}")
    if not 1 <= top_k <= min(num_experts, MAX_TOP_K):
        raise ValueError(
            f"top_k {top_k} is not supported; supported: 1 to {min(num_experts, MAX_TOP_K)}"
        )
    if method == "switch" and top_k != 1:
        raise ValueError(f"method switch routes to one expert, got top_k {top_k}")
    if (method == "noisy") != (noise is not None and noise_logits is not None):
        raise ValueError("noise and noise_logits belong to method noisy, and it needs both")
    for name, tensor in (("noise", noise), ("noise_logits", noise_logits)):
        if tensor is not None:
            runtime.expect_shape(name, tensor, num_tokens, num_experts)
            runtime.unit_stride(name, tensor)
    experts_pad = runtime.next_power_of_2(num_experts)
    block_t = max(1, min(32, 2048 // experts_pad))
    num_blocks = runtime.cdiv(num_tokens, block_t)
    weights = logits.new_empty((num_tokens, top_k), dtype=torch.float32)
    experts = logits.new_empty((num_tokens, top_k), dtype=torch.int32)
    part_z = logits.new_empty(num_blocks, dtype=torch.float32)
    part_prob = logits.new_empty(
        (num_blocks, num_experts) if losses else (1, 1), dtype=torch.float32
    )
    part_count = logits.new_empty(
        (num_blocks, num_experts) if losses else (1, 1), dtype=torch.int32
    )
    runtime.launch(
        _route_kernel, (num_blocks,),
        logits, noise, noise_logits, weights, experts, part_z, part_prob, part_count,
        num_tokens, logits.stride(0),
        0 if noise is None else noise.stride(0),
        0 if noise_logits is None else noise_logits.stride(0),
        NUM_EXPERTS=num_experts, EXPERTS_PAD=experts_pad, TOP_K=top_k,
        K_PAD=runtime.next_power_of_2(top_k),
        BLOCK_T=block_t, NOISY=method == "noisy", RENORMALIZE=renormalize and method != "switch",
        LOSSES=losses,
        num_warps=4,
    )  # fmt: skip
    if not losses:
        return Routing(weights, experts, None, None)
    fraction = part_count.sum(0).float() / (num_tokens * top_k)
    probability = part_prob.sum(0) / num_tokens
    return Routing(
        weights, experts, part_z.sum() / num_tokens, num_experts * (fraction * probability).sum()
    )


def route_reference(
    logits: torch.Tensor,
    top_k: int,
    *,
    method: str = "softmax",
    renormalize: bool = True,
    noise: torch.Tensor | None = None,
    noise_logits: torch.Tensor | None = None,
) -> Routing:
    """The same in float64, losses included."""
    logits = logits.to(torch.float64)
    if noise is not None and noise_logits is not None:
        logits = logits + noise.to(torch.float64) * torch.nn.functional.softplus(
            noise_logits.to(torch.float64)
        )
    probability = logits.softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = probability.gather(-1, order)
    if renormalize and method != "switch":
        weights = weights / weights.sum(-1, keepdim=True)
    num_experts = logits.shape[1]
    fraction = torch.bincount(order.flatten(), minlength=num_experts) / order.numel()
    balance = num_experts * (fraction * probability.mean(0)).sum()
    return Routing(weights, order.to(torch.int32), logits.logsumexp(-1).square().mean(), balance)
