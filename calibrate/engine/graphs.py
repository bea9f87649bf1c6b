"""Decode steps as CUDA graphs: one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from calibrate.engine.batch import Batch
from calibrate.engine.decoder import Model
from calibrate.engine.ops import NoRecorder, Recorder
from calibrate.engine.triton_ops import Requests, TritonPlan
from sim.errors import UserError

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Turns work on fixed tensors into something that repeats it."""


@dataclass(frozen=True)
class _Captured:
    replay: Replay
    logits: torch.Tensor
    """[size, vocab], written by every replay."""


class GraphedDecoder:
    """A decoder whose steps of plain decodes run as graphs, padded to the captured sizes.

    Everything else runs as before, operator by operator. The graphs share their input buffers.
    """

    def __init__(
        self,
        decoder: Model,
        sizes: Sequence[int],
        max_model_len: int,
        capture: Capture | None = None,
    ) -> None:
        """Captures a graph for each of `sizes` decodes, the largest first so that the smaller ones
        reuse its memory. UserError when the decoder cannot be captured."""
        self.decoder = decoder
        self.arch, self.weights, self.cache = decoder.arch, decoder.weights, decoder.cache
        self.block_size, self.heads = decoder.block_size, decoder.heads
        device, top = decoder.weights.device, max(sizes)
        self._max_model_len = max_model_len

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._inputs = zeros(3, top)  # token ids, positions, slots
        # As wide as `plan` may make a table of the longest context.
        width = -(-max_model_len // (16 * decoder.block_size)) * 16
        self._table = zeros(top, width, dtype=torch.int32)
        self._lens = zeros(top, dtype=torch.int32)
        self._rows = torch.arange(top, device=device)
        self._inputs[2] = -1
        capture = capture or cuda_capture(device)
        self._graphs: dict[int, _Captured] = {}
        for size in sorted(set(sizes), reverse=True):
            self._graphs[size] = self._capture(size, capture)
        self._sizes = sorted(self._graphs)

    def plan(self, batch: Batch) -> Any:
        return self.decoder.plan(batch)

    @torch.inference_mode()
    def forward(self, batch: Batch, plan: Any, recorder: Recorder | None = None) -> torch.Tensor:
        """As `Decoder.forward`; a replayed graph is marked as the one operator `graph`."""
        size = self.size_for(batch)
        if size is None:
            return self.decoder.forward(batch, plan, recorder)
        n, r = batch.num_tokens, plan.decodes
        self._inputs[0, :n] = batch.token_ids
        self._inputs[1, :n] = batch.positions
        self._inputs[2, :n] = batch.slots
        self._inputs[2, n:size] = -1
        self._table[:n, : r.block_table.shape[1]] = r.block_table
        self._lens[:n] = r.seq_lens
        self._lens[n:size] = 0
        graph = self._graphs[size]
        graph.replay()
        logits = graph.logits[batch.logit_rows]
        (recorder or NoRecorder()).mark("graph")
        return logits

    def size_for(self, batch: Batch) -> int | None:
        """The captured size that serves this batch; None when it is not plain decodes, or more of
        them than any graph."""
        n = batch.num_tokens
        if batch.num_decodes != n or len(batch.entries) != n:
            return None
        return next((size for size in self._sizes if size >= n), None)

    def _capture(self, size: int, capture: Capture) -> _Captured:
        rows = self._rows[:size]
        batch = Batch(
            token_ids=self._inputs[0, :size],
            positions=self._inputs[1, :size],
            slots=self._inputs[2, :size],
            logit_rows=rows,
            entries=(),
            order=(),
            num_decodes=size,
            num_decode_tokens=size,
        )
        # The grid of the attention kernel is fixed for the longest context; programs beyond a
        # request's own end at once.
        requests = Requests(
            self._table[:size], self._lens[:size], self._max_model_len, None, max_query_len=1
        )
        plan = TritonPlan(requests, None, size, self.heads.window)
        logits = self.weights.lm_head.new_empty((size, self.arch.shape.vocab))

        @torch.inference_mode()
        def work() -> None:
            logits.copy_(self.decoder.forward(batch, plan))

        try:
            return _Captured(capture(work), logits)
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            raise UserError(
                f"a CUDA graph of {size} decodes cannot be captured "
                f"({str(error).splitlines()[0]}); run with --set engine.enforce_eager=true"
            ) from error


def cuda_capture(device: torch.device) -> Capture:
    """Real CUDA graphs, all in one memory pool."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], None]) -> Replay:
        # Kernels are compiled and tuned on a side stream before the capture.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            work()
            work()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            work()
        return graph.replay

    return capture
