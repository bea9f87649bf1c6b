"""The same decoder written the plain way: one text, no cache, full attention in every step."""

from __future__ import annotations

import torch

from calibrate.engine.architecture import Architecture
from calibrate.engine.weights import Experts, Layer, Weights


def logits(arch: Architecture, weights: Weights, ids: list[int]) -> torch.Tensor:
    """Logits of every position of one text, [tokens, vocab]."""
    x = weights.embedding[torch.tensor(ids)]
    for layer in weights.layers:
        x = x + _attention(arch, layer, _norm(x, layer.attention_norm, arch.norm_eps))
        h = _norm(x, layer.mlp_norm, arch.norm_eps)
        if layer.experts is not None:
            x = x + _moe(arch, layer.experts, h)
        else:
            x = x + _mlp(h, layer.gate_up, layer.down)
    return _norm(x, weights.norm, arch.norm_eps) @ weights.lm_head.T


def greedy(arch: Architecture, weights: Weights, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits(arch, weights, ids)[-1].argmax()))
    return ids[len(prompt) :]


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up) @ down.T


def _attention(arch: Architecture, layer: Layer, x: torch.Tensor) -> torch.Tensor:
    shape, tokens = arch.shape, len(x)
    qkv = x @ layer.qkv.T
    if layer.qkv_bias is not None:
        qkv = qkv + layer.qkv_bias
    sizes = [shape.heads * shape.head_dim] + [shape.kv_heads * shape.head_dim] * 2
    q, k, v = (t.view(tokens, -1, shape.head_dim) for t in qkv.split(sizes, dim=-1))
    if layer.q_norm is not None:
        q, k = _norm(q, layer.q_norm, arch.norm_eps), _norm(k, layer.k_norm, arch.norm_eps)
    q, k = _rotate(arch, q), _rotate(arch, k)
    k, v = (t.repeat_interleave(arch.group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * shape.head_dim**-0.5
    at = torch.arange(tokens)
    seen = at[None, :] <= at[:, None]
    if shape.sliding_window is not None:
        seen &= at[None, :] > at[:, None] - shape.sliding_window
    probs = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, v).flatten(1) @ layer.o.T


def _rotate(arch: Architecture, x: torch.Tensor) -> torch.Tensor:
    half = arch.shape.head_dim // 2
    angle = torch.arange(len(x))[:, None, None] * torch.tensor(arch.rope_frequencies())
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _moe(arch: Architecture, experts: Experts, x: torch.Tensor) -> torch.Tensor:
    router = x @ experts.router.T
    if experts.bias is not None:
        router = router + experts.bias
    probs = router.softmax(-1)
    out = torch.zeros_like(x)
    for t in range(len(x)):
        weight, chosen = probs[t].topk(arch.shape.moe.topk)
        if arch.renormalise:
            weight = weight / weight.sum()
        for w, e in zip(weight, chosen.tolist(), strict=True):
            out[t] += w * _mlp(x[t : t + 1], experts.gate_up[e], experts.down[e])[0]
    if experts.shared_gate_up is not None:
        shared = _mlp(x, experts.shared_gate_up, experts.shared_down)
        if experts.shared_gate is not None:
            shared = shared * torch.sigmoid(x @ experts.shared_gate.T)
        out = out + shared
    return out
