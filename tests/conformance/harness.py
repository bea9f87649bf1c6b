"""Drives the plain scheduler through a conformance case and prints the schedule it makes.

Cases and format are those of the recordings of vLLM's real scheduler (see README.md here). Time
is in float seconds or in steps: the scheduler knows no clock.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sim.engine.config import EngineConfig
from sim.engine.plan import StepPlan
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence
from sim.request import Request, Segment, output_key, prompt_key

VLLM_VERSION = "0.33.0"

DEFAULTS: dict[str, Any] = {
    "num_gpu_blocks": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "max_model_len": 4096,
    "async_scheduling": False,
}
"""Where a case's defaults differ from the engine's."""

Record = dict[str, Any]


def engine_config(case: Record) -> EngineConfig:
    settings = {**DEFAULTS, **case["config"]}
    return EngineConfig(**{**settings, "sliding_window": settings.get("sliding_window") or None})


def content_key(kind: str, ident: int) -> int:
    """The text a conformance token belongs to: shared, private prompt or output."""
    return {"g": int, "u": prompt_key, "o": output_key}[kind](ident)


def sequence(spec: Record, index: int, timed: bool) -> Sequence:
    """The sequence for one request of a case."""
    segments = tuple(
        Segment(content_key(kind, ident), start, length)
        for kind, ident, start, length in spec["prompt"]
    )
    request = Request(
        uid=index,
        id=spec["id"],
        arrival_ns=0,
        prompt_tokens=sum(segment.length for segment in segments),
        output_tokens=spec["output_len"],
        segments=segments,
        priority=spec.get("priority", 0),
        cache_salt=spec.get("cache_salt"),
        lora=f"lora{spec['lora']}" if spec.get("lora") else None,
    )
    arrival = spec["arrival_time"] if timed else spec["arrival_step"] + index / (1 << 20)
    return Sequence(request, arrival=arrival, output_content=output_key(spec["uid"]))


@dataclass
class Step:
    """A scheduled step until its output is in."""

    plan: StepPlan
    record: Record
    end: float = 0.0


@dataclass
class Fate:
    """What the document says about one request."""

    first: int | None = None
    finish: int | None = None
    preemptions: int = 0
    hit: int | None = None


@dataclass
class Runner:
    """A model that accepts and proposes drafts by the patterns of the case."""

    requests: dict[str, Record]
    num_speculative_tokens: int
    verified: dict[str, int] = field(default_factory=dict)
    proposed: dict[str, int] = field(default_factory=dict)

    def sampled(self, plan: StepPlan) -> list[int]:
        """Tokens sampled per entry; nothing is asked about sequences that are gone."""
        return [
            1 + self._accepted(seq, plan) if samples and not seq.finished else 0
            for seq, samples in zip(plan.seqs, plan.samples, strict=True)
        ]

    def _accepted(self, seq: Sequence, plan: StepPlan) -> int:
        drafts = plan.drafts.get(seq, 0)
        if not drafts or seq in plan.padded:
            return 0
        pattern = self.requests[seq.id].get("accept", [0])
        k = self.verified.get(seq.id, 0)
        self.verified[seq.id] = k + 1
        return min(drafts, int(pattern[k % len(pattern)]))

    def drafts(self, plan: StepPlan) -> list[int]:
        """Drafts proposed after a synchronous step."""
        return [
            self._drafted(seq) if samples and not seq.finished else 0
            for seq, samples in zip(plan.seqs, plan.samples, strict=True)
        ]

    def _drafted(self, seq: Sequence) -> int:
        limit = self.num_speculative_tokens
        pattern = self.requests[seq.id].get("draft", [limit])
        k = self.proposed.get(seq.id, 0)
        self.proposed[seq.id] = k + 1
        return min(limit, int(pattern[k % len(pattern)]))


class Run:
    """One case, from the first arrival to the last finish."""

    def __init__(
        self, case: Record, check: bool = False, scheduler: Scheduler | None = None
    ) -> None:
        """With `check` the books of scheduler and cache are audited at every step. `scheduler`
        replaces the one with vLLM's policies."""
        self.case = case
        self.check = check
        self.config = engine_config(case)
        self.scheduler = scheduler if scheduler is not None else Scheduler(self.config)
        self.step_time: Record | None = case.get("step_time")
        requests = case["requests"]
        key = "arrival_time" if self.step_time else "arrival_step"
        self.pending = deque(
            sorted(((r[key], i, r) for i, r in enumerate(requests)), key=lambda p: p[:2])
        )
        self.aborts = deque(sorted((step, rid) for step, rid in case.get("aborts", [])))
        self.seqs: dict[str, Sequence] = {}
        self.fates = {r["id"]: Fate() for r in requests}
        self.runner = Runner({r["id"]: r for r in requests}, self.config.num_speculative_tokens)
        self.full = case.get("record", "full") == "full"
        few = self.full and len(requests) <= 64
        self.record_queues = case.get("record_queues", few)
        self.record_blocks = case.get("record_blocks", few)
        self.record_free_queue = case.get("record_free_queue", False)
        self.known_blocks: dict[str, int] = {}
        self.steps: list[Record] = []
        self.num_tokens = 0
        self.num_calls = 0
        self.max_steps = case.get("max_steps", 200_000)

    # -- events

    def let_in(self, now: float) -> None:
        """Arrivals and aborts due at `now`, in that order."""
        while self.pending and self.pending[0][0] <= now:
            _, index, spec = self.pending.popleft()
            seq = sequence(spec, index, timed=self.step_time is not None)
            self.seqs[seq.id] = seq
            self.scheduler.add(seq)
        while self.aborts and self.aborts[0][0] <= now:
            aborted = self.seqs.get(self.aborts.popleft()[1])
            if aborted is not None:
                self.scheduler.abort(aborted)

    def next_arrival(self) -> float | None:
        return self.pending[0][0] if self.pending else None

    def duration(self, plan: StepPlan) -> float:
        if self.step_time is None:
            return 0.0
        return float(self.step_time["a"] + self.step_time["b"] * plan.total_tokens)

    # -- steps

    def schedule(self, index: int, now: float) -> Step:
        self.num_calls += 1
        if self.num_calls > self.max_steps:
            raise RuntimeError("livelock: max_steps reached")
        plan = self.scheduler.schedule()
        if self.check:
            self.scheduler.check_integrity()
        self.num_tokens += plan.total_tokens
        for seq in plan.preempted:
            self.fates[seq.id].preemptions += 1
            self.known_blocks.pop(seq.id, None)
        record: Record = {"i": index}
        if self.step_time is not None:
            record["t"] = round(now, 9)
        record["s"] = [self._entry(plan, i) for i in range(len(plan.seqs))]
        if self.record_blocks:
            record["b"] = [self._new_blocks(seq) for seq in plan.seqs]
        record["pre"] = [seq.id for seq in plan.preempted]
        record["fin"] = []
        record["free"] = [self.scheduler.cache.num_free, None]
        record["q"] = [self.scheduler.num_running, self.scheduler.num_waiting]
        if self.record_queues:
            record["run"] = [seq.id for seq in self.scheduler.running]
            record["wait"] = [seq.id for seq in self.scheduler.waiting]
        return Step(plan, record)

    def _entry(self, plan: StepPlan, i: int) -> list[Any]:
        seq, num_computed = plan.seqs[i], plan.num_computed[i]
        kind = "R" if i < plan.num_running else "P" if seq.num_preemptions else "N"
        if kind == "N":
            self.fates[seq.id].hit = num_computed
        entry = [seq.id, plan.num_tokens[i], num_computed, kind]
        if self.config.speculative:
            entry.append(plan.drafts.get(seq, 0))
        return entry

    def _new_blocks(self, seq: Sequence) -> list[int]:
        if self.config.sliding_window:
            return list(seq.blocks)
        known = self.known_blocks.get(seq.id, 0)
        self.known_blocks[seq.id] = len(seq.blocks)
        return seq.blocks[known:]

    def update(self, step: Step) -> None:
        plan, record = step.plan, step.record
        sampled = self.runner.sampled(plan)
        # The recorder notes one token for a sequence that left while its step ran.
        generated = [1 if q.finished else n for q, n in zip(plan.seqs, sampled, strict=True)]
        result = self.scheduler.update(plan, sampled)
        if self.config.speculative and not self.config.async_scheduling and plan:
            self.scheduler.update_drafts(plan, self.runner.drafts(plan))
        if self.check:
            self.scheduler.check_integrity()
        record["fin"] = [seq.id for seq in result.finished]
        record["free"][1] = self.scheduler.cache.num_free
        if self.config.speculative:
            record["g"] = generated
        if self.record_free_queue:
            record["fq"] = list(self.scheduler.cache.pool.free)
        for seq, n in zip(plan.seqs, generated, strict=True):
            if n and self.fates[seq.id].first is None:
                self.fates[seq.id].first = record["i"]
        for seq in result.finished:
            self.fates[seq.id].finish = record["i"]
            self.known_blocks.pop(seq.id, None)

    # -- loops

    def run(self) -> Run:
        if self.config.async_scheduling:
            self._run_async()
        else:
            self._run_sync()
        return self

    def _run_sync(self) -> None:
        scheduler, index, now = self.scheduler, 0, 0.0
        while True:
            self.let_in(now if self.step_time else index)
            if not scheduler.has_unfinished:
                if scheduler.has_unseen_finish:
                    scheduler.schedule()  # vLLM's empty step after the last finish; not recorded
                arrival = self.next_arrival()
                if arrival is None:
                    return
                if self.step_time:
                    now = max(now, arrival)
                else:
                    index = max(index, int(arrival))
                continue
            step = self.schedule(index, now)
            if not step.plan and not step.plan.preempted:
                raise RuntimeError(f"stuck at step {index}: nothing schedulable")
            now += self.duration(step.plan)
            self.update(step)
            self.steps.append(step.record)
            index += 1

    def _run_async(self) -> None:
        """Two steps in flight: each is planned before the output of the one before it is in."""
        scheduler, index = self.scheduler, 0
        in_flight: deque[Step] = deque()
        now = device_free = 0.0
        idle = 0
        while True:
            self.let_in(now if self.step_time else index)
            if not scheduler.has_work and not in_flight:
                arrival = self.next_arrival()
                if arrival is None:
                    return
                if self.step_time:
                    now = max(now, arrival)
                else:
                    index = max(index, int(arrival))
                continue
            if scheduler.has_work:
                unfinished = scheduler.has_unfinished
                step = self.schedule(index, now)
                plan = step.plan
                idle = 0 if plan or in_flight else idle + 1
                if idle > 3:
                    raise RuntimeError(f"stuck at step {index}")
                if plan:
                    device_free = max(device_free, now) + self.duration(plan)
                step.end = device_free
                if unfinished or plan or plan.preempted:
                    self.steps.append(step.record)
                    index += 1
                in_flight.append(step)
                if len(in_flight) < 2 and (plan or scheduler.has_work):
                    continue
            step = in_flight.popleft()
            now = max(now, step.end)
            self.update(step)

    # -- document

    def document(self) -> str:
        """The schedule in the format of the recordings, byte for byte."""
        document: Record = {
            "case": self.case["name"],
            "vllm": VLLM_VERSION,
            "num_steps": len(self.steps),
            "num_tokens": self.num_tokens,
            "preemptions": sum(fate.preemptions for fate in self.fates.values()),
            "requests": {
                rid: [fate.first, fate.finish, fate.preemptions, fate.hit]
                for rid, fate in self.fates.items()
            },
        }
        crc, lines = 0, []
        for step in self.steps:
            record = dict(step)
            crc = zlib.crc32(_compact(record["s"]).encode(), crc)
            if not self.full:
                entries = record.pop("s")
                record["n"] = len(entries)
                record["tok"] = sum(entry[1] for entry in entries)
                record["adm"] = [entry for entry in entries if entry[3] != "R"]
                record["crc"] = crc
            lines.append(_compact(record))
        document["crc"] = crc
        if self.config.num_blocks <= 512:
            document["final_free_queue"] = list(self.scheduler.cache.pool.free)
        head = ",\n".join(f"{json.dumps(k)}:{_compact(v)}" for k, v in document.items())
        return "{" + head + ',\n"steps":[\n' + ",\n".join(lines) + "\n]}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
