"""The modified rejection sampling of speculative decoding (Leviathan et al. 2023, algorithm 1; Chen
et al. 2023).

A draft token x, drawn from q, is accepted with probability min(1, p(x) / q(x)); the first one
rejected is replaced by a draw from max(p - q, 0), normalised; if all are accepted, one more token
comes from p. The tokens that come out are distributed exactly as if drawn from p alone, whatever q
is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import runtime


class Verdict(NamedTuple):
    """What one verification yields per request: `num_accepted` drafts, then one more token."""

    tokens: (
        torch.Tensor
    )  # [requests, drafts + 1] int64; entries past num_accepted are 0 and mean nothing
    num_accepted: torch.Tensor  # [requests] int32


@triton.jit
def _weight(p_target, p_draft, o_v, vocab, token, residual, HAS_DRAFT: tl.constexpr):
    """What the last token is drawn by: p, or after a rejection max(p - q, 0)."""
    b_p = tl.load(p_target + o_v, mask=o_v < vocab, other=0.0)
    if HAS_DRAFT:
        b_q = tl.load(p_draft + o_v, mask=o_v < vocab * residual, other=0.0)
    else:
        b_q = (o_v == token).to(tl.float32)  # a draft that had no alternative
    return tl.where(residual == 1, tl.maximum(b_p - b_q, 0.0), b_p)


@triton.jit
def _verify_kernel(
    Drafts, DraftProbs, TargetProbs, NumDrafts, AcceptUniforms, LastUniforms, Tokens, NumAccepted,
    vocab, s_d, s_qb, s_qk, s_pb, s_pk, s_u, s_t,
    K: tl.constexpr, K_PAD: tl.constexpr, HAS_DRAFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, K_PAD)
    num_drafts = tl.minimum(tl.load(NumDrafts + i_b), K)
    m_k = o_k < num_drafts
    b_token = tl.load(Drafts + i_b * s_d + o_k, mask=m_k, other=0).to(tl.int64)
    b_p = tl.load(TargetProbs + i_b * s_pb + o_k * s_pk + b_token, mask=m_k, other=0.0)
    if HAS_DRAFT:
        b_q = tl.load(DraftProbs + i_b * s_qb + o_k * s_qk + b_token, mask=m_k, other=1.0)
    else:
        b_q = tl.full([K_PAD], 1.0, tl.float32)
    b_u = tl.load(AcceptUniforms + i_b * s_u + o_k, mask=m_k, other=0.0)
    accept = b_u * b_q < b_p
    n = tl.min(tl.where(m_k & (accept == 0), o_k, num_drafts), 0)
    tl.store(Tokens + i_b * s_t + o_k, b_token, mask=o_k < n)
    tl.store(NumAccepted + i_b, n)

    # The token after them.
    residual = (n < num_drafts).to(tl.int32)
    token = tl.load(Drafts + i_b * s_d + n, mask=n < num_drafts, other=-1)
    p_target = TargetProbs + i_b * s_pb + n * s_pk
    p_draft = DraftProbs
    if HAS_DRAFT:
        p_draft = DraftProbs + i_b * s_qb + n * s_qk
    b_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_sum += _weight(p_target, p_draft, o_v, vocab, token, residual, HAS_DRAFT)
    total = tl.sum(b_sum, 0)
    if total <= 0.0:  # p equals q but for rounding: nothing is left over, and p itself is as good
        residual = 0
        b_sum = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            o_v = start + tl.arange(0, BLOCK)
            b_sum += _weight(p_target, p_draft, o_v, vocab, token, residual, HAS_DRAFT)
        total = tl.sum(b_sum, 0)
    target = tl.load(LastUniforms + i_b) * total
    passed = tl.full([BLOCK], 2147483647, tl.int32)
    last = tl.full([BLOCK], 0, tl.int32)
    before = 0.0
    for start in range(0, vocab, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_w = _weight(p_target, p_draft, o_v, vocab, token, residual, HAS_DRAFT)
        b_run = before + tl.cumsum(b_w, 0)
        passed = tl.minimum(passed, tl.where((b_w > 0.0) & (b_run > target), o_v, 2147483647))
        last = tl.maximum(last, tl.where(b_w > 0.0, o_v, 0))
        before += tl.sum(b_w, 0)
    choice = tl.minimum(tl.min(passed, 0), tl.max(last, 0))
    tl.store(Tokens + i_b * s_t + n, choice.to(tl.int64))


def verify_drafts(
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
    last_uniforms: torch.Tensor,
    num_drafts: torch.Tensor | None = None,
) -> Verdict:
    """Accept or replace the drafts of each request; deterministic given the uniforms.

    drafts           [requests, k] int32 or int64, k >= 1.
    draft_probs      [requests, k, vocab] fp32, what each draft was drawn from; None for drafts
                     without alternatives (n-gram, greedy): q is then 1 at the draft.
    target_probs     [requests, k + 1, vocab] fp32: the target's distribution at each draft, and
                     after the last. Both after temperature, top-k and top-p
                     (`sampling.probabilities`); greedy requests are one-hot rows.
    accept_uniforms  [requests, k] fp32 in [0, 1); last_uniforms [requests] fp32 in [0, 1).
    num_drafts       [requests] int32, how many of the k are real; all by default.
    """
    runtime.expect_shape("drafts", drafts, None, None)
    num_requests, k = drafts.shape
    if k < 1:
        raise ValueError("drafts: at least one draft token per request is needed")
    runtime.one_of("drafts dtype", drafts.dtype, (torch.int32, torch.int64))
    runtime.expect_shape("target_probs", target_probs, num_requests, k + 1, None)
    vocab = target_probs.shape[2]
    runtime.one_of("target_probs dtype", target_probs.dtype, (torch.float32,))
    runtime.unit_stride("target_probs", target_probs)
    if draft_probs is not None:
        runtime.expect_shape("draft_probs", draft_probs, num_requests, k, vocab)
        runtime.one_of("draft_probs dtype", draft_probs.dtype, (torch.float32,))
        runtime.unit_stride("draft_probs", draft_probs)
    runtime.expect_shape("accept_uniforms", accept_uniforms, num_requests, k)
    runtime.expect_shape("last_uniforms", last_uniforms, num_requests)
    for name, tensor in (("drafts", drafts), ("accept_uniforms", accept_uniforms)):
        runtime.unit_stride(name, tensor)
    if num_drafts is None:
        num_drafts = torch.full((num_requests,), k, dtype=torch.int32, device=drafts.device)
    runtime.expect_shape("num_drafts", num_drafts, num_requests)
    tokens = torch.zeros((num_requests, k + 1), dtype=torch.int64, device=drafts.device)
    num_accepted = torch.empty(num_requests, dtype=torch.int32, device=drafts.device)
    strides_q = (0, 0) if draft_probs is None else draft_probs.stride()[:2]
    runtime.launch(
        _verify_kernel, (num_requests,),
        drafts, draft_probs, target_probs, num_drafts, accept_uniforms, last_uniforms, tokens,
        num_accepted,
        vocab, drafts.stride(0), *strides_q, *target_probs.stride()[:2], accept_uniforms.stride(0),
        tokens.stride(0),
        K=k, K_PAD=runtime.next_power_of_2(k), HAS_DRAFT=draft_probs is not None,
        BLOCK=max(16, min(2048, runtime.next_power_of_2(vocab))),
        num_warps=8 if vocab > 1024 else 1,
    )  # fmt: skip
    return Verdict(tokens, num_accepted)


def verify_drafts_reference(
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
    last_uniforms: torch.Tensor,
    num_drafts: torch.Tensor | None = None,
) -> list[list[int]]:
    """The tokens of each request, in float64, one draft at a time."""
    results: list[list[int]] = []
    for i in range(drafts.shape[0]):
        count = drafts.shape[1] if num_drafts is None else int(num_drafts[i])
        tokens: list[int] = []
        weight = target_probs[i, count].to(torch.float64)
        for j in range(count):
            token = int(drafts[i, j])
            p = target_probs[i, j].to(torch.float64)
            q = torch.zeros_like(p)
            q[token] = 1.0
            if draft_probs is not None:
                q = draft_probs[i, j].to(torch.float64)
            if float(accept_uniforms[i, j]) * float(q[token]) < float(p[token]):
                tokens.append(token)
                continue
            rest = (p - q).clamp(min=0)
            weight = rest if rest.sum() > 0 else p
            break
        target = float(last_uniforms[i]) * weight.sum()
        tokens.append(int(((weight.cumsum(-1) > target) & (weight > 0)).to(torch.int32).argmax()))
        results.append(tokens)
    return results
