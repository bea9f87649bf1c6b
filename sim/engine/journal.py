"""What the plain engine writes down: the step log and one record per request."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from sim.cost.interface import StepShape
from sim.engine.interface import RequestRecord, Status
from sim.engine.log import StepLog
from sim.engine.plan import StepPlan
from sim.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Life:
    """One request in the engine: its sequence, its record, and where its tokens are in the log."""

    seq: Sequence
    record: RequestRecord
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Finished runs of rows with tokens."""
    first_row: int = -1
    """First row of the run it is in."""
    last_row: int = -1
    """Last row with a token."""

    def token_spans(self) -> tuple[tuple[int, int], ...]:
        if self.last_row < 0:
            return ()
        return (*self.spans, (self.first_row, self.last_row))


@dataclass(slots=True)
class Row:
    """A step in flight: what its log row will say."""

    start_ns: int
    end_ns: int
    shape: StepShape
    num_running: int
    num_waiting: int
    cached_tokens: int
    num_preempted: int
    kv_used_blocks: int


class Journal:
    """Keeps the log and the records of the requests inside."""

    def __init__(self) -> None:
        self.log = StepLog()
        self.lives: dict[Sequence, Life] = {}
        self.by_uid: dict[int, Life] = {}

    def enter(self, seq: Sequence, now: int) -> None:
        """A request was queued."""
        record = RequestRecord(seq.request, Status.UNFINISHED, queued_ns=now)
        self.lives[seq] = self.by_uid[seq.request.uid] = Life(seq, record)

    def leave(self, seq: Sequence, status: Status, now: int) -> RequestRecord:
        """A request is gone; its completed record."""
        life = self.lives.pop(seq)
        del self.by_uid[seq.request.uid]
        return self._written_up(life, status, now)

    def unfinished(self) -> list[RequestRecord]:
        """Records of the requests inside, as they are now."""
        return [
            self._written_up(
                Life(
                    life.seq,
                    dataclasses.replace(life.record),
                    life.spans,
                    life.first_row,
                    life.last_row,
                ),
                Status.UNFINISHED,
                -1,
            )
            for life in self.lives.values()
        ]

    @staticmethod
    def _written_up(life: Life, status: Status, finish_ns: int) -> RequestRecord:
        record = life.record
        record.status = status
        record.finish_ns = finish_ns
        record.output_tokens = life.seq.num_output_tokens
        record.preemptions = life.seq.num_preemptions
        record.token_spans = life.token_spans()
        return record

    def admitted(self, plan: StepPlan, start_ns: int) -> int:
        """Note the admissions of a step that starts then; their prefix-cache hits together."""
        cached = 0
        for i in range(plan.num_running, len(plan.seqs)):
            seq, hit = plan.seqs[i], plan.num_computed[i]
            cached += hit
            record = self.lives[seq].record
            if seq.num_preemptions:
                record.recomputed_tokens += max(0, seq.num_lost_tokens - hit)
            else:
                record.first_scheduled_ns = start_ns
                record.cached_tokens = hit
        return cached

    def commit(self, row: Row, plan: StepPlan, new_tokens: list[int]) -> None:
        """Append the row of a step whose output has come, with who got how many tokens."""
        index, log, lives = len(self.log), self.log, self.lives
        before = index - 1
        num_gaps = 0
        for seq, count in zip(plan.seqs, new_tokens, strict=True):
            if not count:
                continue
            life = lives[seq]
            if count > 1:
                log.num_zero_gaps += count - 1
            last = life.last_row
            if last == before and last >= 0:
                num_gaps += 1
            else:
                if last < 0:
                    life.record.first_token_ns = row.end_ns
                else:
                    log.add_long_gap(index, row.end_ns - log.end_ns(last))
                    life.spans.append((life.first_row, last))
                life.first_row = index
            life.last_row = index
        shape = row.shape
        log.add_step(
            row.start_ns,
            row.end_ns,
            row.num_running,
            row.num_waiting,
            shape.num_decodes,
            shape.num_decode_tokens,
            shape.decode_context,
            shape.decode_context_sq,
            shape.prefills,
            shape.num_sampled,
            row.cached_tokens,
            row.num_preempted,
            row.kv_used_blocks,
            num_gaps,
        )
