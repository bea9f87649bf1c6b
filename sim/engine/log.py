"""What a replica did, step by step: columns of integers, cheap to append, expanded at the end.

A row is one executed step (a schedule with no tokens takes no time and has no row). Rows appear
in execution order when a step's outputs are committed, so the row number is the step index that
`RequestRecord.token_spans` refers to. A run of decode-only steps of one fixed batch is stored as
one entry: only the ends and the KV usage take memory per step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct

import numpy as np
import numpy.typing as npt

from sim.cost.interface import StepShapes

IntArray = npt.NDArray[np.int64]

COLUMNS = (
    "start_ns",
    "end_ns",
    "num_running",
    "num_waiting",
    "num_decodes",
    "decode_tokens",
    "decode_context",
    "decode_context_sq",
    "num_prefills",
    "prefill_tokens",
    "num_sampled",
    "cached_tokens",
    "num_preempted",
    "num_gaps",
    "kv_used_blocks",
)
"""The step table's, explained at `StepLog`."""

# Records are packed into bytes: a third of the memory of Python integers, and cheap to append.
_ENTRY = np.dtype(
    [
        ("start_ns", "<i8"),
        ("decode_context", "<i8"),
        ("decode_context_sq", "<i8"),
        ("num_steps", "<i4"),
        ("num_running", "<i4"),
        ("num_waiting", "<i4"),
        ("num_decodes", "<i4"),
        ("num_gaps", "<i4"),
    ]
)
_EXTRA = np.dtype(
    [
        ("entry", "<i8"),
        ("decode_tokens", "<i8"),
        ("num_sampled", "<i8"),
        ("cached_tokens", "<i8"),
        ("num_preempted", "<i8"),
    ]
)
"""What only an unusual step needs."""
_CHUNK = np.dtype([("step", "<i8"), ("tokens", "<i4"), ("prefix", "<i4")])
_pack_entry = Struct("<3q5i").pack
_pack_extra = Struct("<5q").pack
_pack_chunk = Struct("<q2i").pack


class StepLog:
    """The step table of one replica.

    Columns of `table()`, one value per step:

    * `start_ns`, `end_ns`: when the step began and ended on the device. Row order is time order.
    * `num_running`, `num_waiting`: queue lengths after the step was scheduled.
    * `num_decodes`, `decode_tokens`, `decode_context`, `decode_context_sq`, `num_sampled`: as in
      `StepShape`; `num_prefills`, `prefill_tokens`: prefill chunks and their tokens.
    * `cached_tokens`: prefix-cache hits of the requests admitted (first or again) in the step.
    * `num_preempted`: victims of scheduling it (those of an empty schedule count in the next row).
    * `kv_used_blocks`: blocks held by requests after it was scheduled.
    * `num_gaps`: requests that had tokens in this step's output and in the previous row's; each
      is one inter-token gap of `end_ns` minus the previous row's `end_ns`.

    Gaps that span more than one row are listed one by one (`long_gaps`), gaps between tokens of
    one step are zero and counted (`num_zero_gaps`); so the ITL distribution is exact (`gaps`).
    """

    __slots__ = (
        "_chunks",
        "_ends",
        "_entries",
        "_extras",
        "_kv_used",
        "_long_gaps",
        "num_zero_gaps",
    )

    def __init__(self) -> None:
        self._entries = bytearray()
        self._extras = bytearray()
        self._chunks = bytearray()
        self._ends = array("q")  # one per step
        self._kv_used = array("i")  # one per step
        self._long_gaps = array("q")  # (step, ns) per gap
        self.num_zero_gaps = 0
        """Gaps between two tokens of one request in one step (speculation)."""

    def __len__(self) -> int:
        """Number of steps so far: the index the next row will get."""
        return len(self._ends)

    # -- written by the engines

    def add_step(
        self,
        start_ns: int,
        end_ns: int,
        num_running: int,
        num_waiting: int,
        num_decodes: int,
        decode_tokens: int,
        decode_context: int,
        decode_context_sq: int,
        prefills: Sequence[tuple[int, int]],
        num_sampled: int,
        cached_tokens: int,
        num_preempted: int,
        kv_used_blocks: int,
        num_gaps: int,
    ) -> None:
        """Append one step; `prefills` as in `StepShape`."""
        self.add_details(
            len(self._ends),
            prefills,
            num_decodes,
            decode_tokens,
            num_sampled,
            cached_tokens,
            num_preempted,
        )
        self.add_entry(
            1,
            start_ns,
            num_running,
            num_waiting,
            num_decodes,
            decode_context,
            decode_context_sq,
            num_gaps,
        )
        self.add_ends([end_ns], [kv_used_blocks])

    def add_entry(
        self,
        num_steps: int,
        start_ns: int,
        num_running: int,
        num_waiting: int,
        num_decodes: int,
        decode_context: int,
        decode_context_sq: int,
        num_gaps: int,
    ) -> None:
        """Describe the next `num_steps` steps, whose ends will come by `add_ends`.

        They hold decodes of one batch, one token per request and step, and what `add_details` has
        just said. Each starts when the one before ends, the first at `start_ns`. Contexts and
        gaps are the first step's; then contexts grow by one per step, and all decodes have a gap.
        """
        self._entries += _pack_entry(
            start_ns,
            decode_context,
            decode_context_sq,
            num_steps,
            num_running,
            num_waiting,
            num_decodes,
            num_gaps,
        )

    def add_details(
        self,
        step: int,
        prefills: Sequence[tuple[int, int]],
        num_decodes: int,
        decode_tokens: int,
        num_sampled: int,
        cached_tokens: int,
        num_preempted: int,
    ) -> None:
        """What is special about the step numbered `step`, which the next entry is for."""
        for tokens, prefix in prefills:
            self._chunks += _pack_chunk(step, tokens, prefix)
        if (
            num_sampled != num_decodes
            or decode_tokens != num_decodes
            or cached_tokens
            or num_preempted
        ):
            entry = len(self._entries) // _ENTRY.itemsize
            self._extras += _pack_extra(
                entry, decode_tokens, num_sampled, cached_tokens, num_preempted
            )

    def add_ends(self, ends_ns: list[int], kv_used_blocks: list[int]) -> None:
        """End and KV usage of each of the steps described since the last call."""
        self._ends.fromlist(ends_ns)
        self._kv_used.fromlist(kv_used_blocks)

    def add_long_gap(self, step: int, ns: int) -> None:
        """A gap of `ns` that ends with row `step` and began before row `step - 1`."""
        self._long_gaps.extend((step, ns))

    def end_ns(self, step: int) -> int:
        """When a step that is in the log ended."""
        return self._ends[step]

    # -- read when the run is over

    def table(self) -> dict[str, IntArray]:
        """The columns described above, equally long; `pandas.DataFrame(log.table())` works."""
        entries = self._expanded_entries()
        repeats = entries.pop("num_steps")
        first = np.cumsum(repeats) - repeats
        columns = {name: np.repeat(values, repeats) for name, values in entries.items()}
        position = np.arange(len(self._ends), dtype=np.int64) - np.repeat(first, repeats)

        ends = np.array(self._ends, dtype=np.int64)
        later = position > 0
        columns["start_ns"][later] = ends[np.flatnonzero(later) - 1]
        columns["num_gaps"][later] = columns["num_decodes"][later]
        # (c + i)^2 summed over a batch: squares + 2 i contexts + i^2 requests.
        decodes, context = columns["num_decodes"], columns["decode_context"]
        columns["decode_context_sq"] += position * (2 * context + position * decodes)
        columns["decode_context"] = context + position * decodes

        step, tokens, _ = self.chunks()
        columns["num_prefills"] = np.bincount(step, minlength=len(ends))
        columns["prefill_tokens"] = np.zeros(len(ends), dtype=np.int64)
        np.add.at(columns["prefill_tokens"], step, tokens)
        columns["end_ns"] = ends
        columns["kv_used_blocks"] = np.array(self._kv_used, dtype=np.int64)
        return {name: columns[name] for name in COLUMNS}

    def _expanded_entries(self) -> dict[str, IntArray]:
        entries, extras = np.frombuffer(self._entries, _ENTRY), np.frombuffer(self._extras, _EXTRA)
        columns = {name: entries[name].astype(np.int64) for name in _ENTRY.names or ()}
        decodes = columns["num_decodes"]
        usual = {"decode_tokens": decodes, "num_sampled": decodes}
        for name in (_EXTRA.names or ())[1:]:
            columns[name] = usual[name].copy() if name in usual else np.zeros_like(decodes)
            columns[name][extras["entry"]] = extras[name]
        return columns

    def chunks(self) -> tuple[IntArray, IntArray, IntArray]:
        """(step, tokens, prefix) of every prefill chunk, in schedule order."""
        chunks = np.frombuffer(self._chunks, _CHUNK)
        return (
            chunks["step"].astype(np.int64),
            chunks["tokens"].astype(np.int64),
            chunks["prefix"].astype(np.int64),
        )

    @property
    def last_end_ns(self) -> int:
        """End of the last step; 0 before the first."""
        return self._ends[-1] if self._ends else 0

    def shapes(self, table: dict[str, IntArray] | None = None) -> StepShapes:
        """All steps as the cost model sees them; `table` saves making it again."""
        table = self.table() if table is None else table
        chunk_step, chunk_tokens, chunk_prefix = self.chunks()
        return StepShapes(
            num_decodes=table["num_decodes"],
            decode_tokens=table["decode_tokens"],
            decode_context=table["decode_context"],
            decode_context_sq=table["decode_context_sq"],
            num_sampled=table["num_sampled"],
            num_tokens=table["decode_tokens"] + table["prefill_tokens"],
            chunk_step=chunk_step,
            chunk_tokens=chunk_tokens,
            chunk_prefix=chunk_prefix,
        )

    def long_gaps(self) -> tuple[IntArray, IntArray]:
        """(step, ns) of every gap that spans more than one row, sorted by both."""
        step, ns = _matrix(self._long_gaps, 2).T
        order = np.lexsort((ns, step))
        return step[order], ns[order]

    def gaps(
        self, table: dict[str, IntArray] | None = None, since_ns: int = 0
    ) -> tuple[IntArray, IntArray]:
        """All inter-token gaps that end at `since_ns` or later (zero gaps: all), as (ns, how
        many); not merged, not sorted, no zero weights. `table` saves making it again."""
        table = self.table() if table is None else table
        end = table["end_ns"]
        ns = np.diff(end, prepend=end[:1])
        some = (table["num_gaps"] > 0) & (end >= since_ns)
        long_step, long_ns = self.long_gaps()
        long_ns = long_ns[end[long_step] >= since_ns]
        zeros = np.full(1 if self.num_zero_gaps else 0, self.num_zero_gaps, dtype=np.int64)
        return (
            np.concatenate((ns[some], long_ns, np.zeros_like(zeros))),
            np.concatenate((table["num_gaps"][some], np.ones_like(long_ns), zeros)),
        )


def _matrix(values: array[int], width: int) -> IntArray:
    return np.array(values, dtype=np.int64).reshape(-1, width)
