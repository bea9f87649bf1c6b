"""The forward pass over a batch: one code for every model of the family and every device."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from calibrate.engine.architecture import Architecture
from calibrate.engine.batch import Batch
from calibrate.engine.ops import HeadShape, LayerCache, NoRecorder, Ops, Recorder
from calibrate.engine.weights import Experts, Layer, Weights


class Model(Protocol):
    """What the runner runs: a decoder, or one whose decode steps are CUDA graphs."""

    arch: Architecture
    weights: Weights
    cache: list[LayerCache]
    heads: HeadShape
    block_size: int

    def plan(self, batch: Batch) -> Any:
        """What attention needs to know of the batch; made once, before `forward`."""
        ...

    def forward(self, batch: Batch, plan: Any, recorder: Recorder | None = None) -> torch.Tensor:
        """Logits [logit rows, vocab] in the weights' dtype; keys and values go into the cache."""
        ...


class Decoder:
    """A model with its paged KV cache on one device.

    Calls operators in a fixed order and tells the recorder each one's name: `embedding`, then per
    layer `norm`, `qkv`, `rope`, `attention_decode`, `attention_prefill`, `o`, `norm`, and
    `gate_up`, `act`, `down` or `moe`; `norm` and `lm_head` at the end.
    """

    def __init__(
        self,
        arch: Architecture,
        weights: Weights,
        ops: Ops,
        *,
        num_blocks: int,
        block_size: int,
        max_positions: int,
    ) -> None:
        """`num_blocks` counts the null block. Allocates the KV cache."""
        shape = arch.shape
        self.arch, self.weights, self.ops = arch, weights, ops
        self.block_size = block_size
        self.heads = HeadShape(shape.heads, shape.kv_heads, shape.head_dim, shape.sliding_window)
        size = (num_blocks, block_size, shape.kv_heads, shape.head_dim)
        self.cache = [
            LayerCache(
                *(torch.zeros(size, dtype=weights.dtype, device=weights.device) for _ in "kv")
            )
            for _ in range(shape.layers)
        ]
        self._cos_sin = _cos_sin(arch, max_positions, weights)

    def plan(self, batch: Batch) -> Any:
        """What attention needs to know of the batch; made once, before `forward`."""
        return self.ops.plan(batch, self.heads, self.block_size)

    @torch.inference_mode()
    def forward(self, batch: Batch, plan: Any, recorder: Recorder | None = None) -> torch.Tensor:
        """Logits [logit rows, vocab] in the weights' dtype; keys and values go into the cache."""
        mark = (recorder or NoRecorder()).mark
        eps, ops, weights = self.arch.norm_eps, self.ops, self.weights
        x = F.embedding(batch.token_ids, weights.embedding)
        residual: torch.Tensor | None = None
        mark("embedding")
        for layer, cache in zip(weights.layers, self.cache, strict=True):
            x, residual = ops.add_norm(x, residual, layer.attention_norm, eps)
            mark("norm")
            x = self._attention(x, layer, cache, batch, plan, recorder or NoRecorder())
            x, residual = ops.add_norm(x, residual, layer.mlp_norm, eps)
            mark("norm")
            if layer.experts is not None:
                x = self._experts(x, layer.experts)
                mark("moe")
                continue
            x = F.linear(x, _given(layer.gate_up))
            mark("gate_up")
            x = ops.silu_mul(x)
            mark("act")
            x = F.linear(x, _given(layer.down))
            mark("down")
        rows = batch.logit_rows
        x, _ = ops.add_norm(x[rows], _given(residual)[rows], weights.norm, eps)
        mark("norm")
        logits = F.linear(x, weights.lm_head)
        mark("lm_head")
        return logits

    def _attention(
        self,
        x: torch.Tensor,
        layer: Layer,
        cache: LayerCache,
        batch: Batch,
        plan: Any,
        recorder: Recorder,
    ) -> torch.Tensor:
        ops, heads, mark = self.ops, self.heads, recorder.mark
        x = F.linear(x, layer.qkv, layer.qkv_bias)
        mark("qkv")
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm, layer.k_norm, self.arch.norm_eps)
        query = ops.rope_write(x, batch.positions, self._cos_sin, batch.slots, cache, heads, norms)
        mark("rope")
        out = query.new_empty(query.shape)
        if batch.num_decodes:
            ops.decode(query, cache, plan, out)
            mark("attention_decode")
        if batch.num_decode_tokens < batch.num_tokens:
            ops.prefill(query, cache, plan, out)
            mark("attention_prefill")
        x = F.linear(out.view(out.shape[0], heads.heads * heads.dim), layer.o)
        mark("o")
        return x

    def _experts(self, x: torch.Tensor, experts: Experts) -> torch.Tensor:
        moe = self.arch.shape.moe
        if moe is None:
            raise ValueError("experts in a model without experts")
        routed = self.ops.experts(x, experts, moe.topk, self.arch.renormalise)
        if experts.shared_gate_up is None:
            return routed
        wide = self.ops.silu_mul(F.linear(x, experts.shared_gate_up))
        shared = F.linear(wide, _given(experts.shared_down))
        if experts.shared_gate is not None:
            shared = shared * torch.sigmoid(F.linear(x, experts.shared_gate))
        return routed + shared


def _given(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise ValueError("a weight that this kind of layer needs is missing")
    return tensor


def _cos_sin(arch: Architecture, positions: int, weights: Weights) -> torch.Tensor:
    """[positions, head_dim] fp32: cosines of every pair of dimensions, then sines."""
    frequencies = torch.tensor(arch.rope_frequencies(), dtype=torch.float64)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).float().to(weights.device)
