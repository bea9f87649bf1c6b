"""Prefills in a row: chunks in progress, and admissions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.engine.fast.prefix import Hit
from sim.engine.fast.rules import NO_LIMIT
from sim.engine.fast.sequence import PREFILL, FastSequence
from sim.engine.fast.timeline import Row

if TYPE_CHECKING:
    from sim.engine.fast.scheduler import FastScheduler


def next_chunks(
    scheduler: FastScheduler, budget: int, limit: int, free: int
) -> list[tuple[FastSequence, int]] | None:
    """The next chunk of every prefill in progress, of at most `limit` tokens.

    `budget` tokens and `free` blocks are left for them by the decodes. None if order matters:
    they do not suffice for all, and someone comes after the one who takes the last.
    """
    size = scheduler.block_size
    chunks = []
    for seq in scheduler.prefilling:
        count = min(seq.known - seq.computed, limit)
        if count > budget:
            if seq is not next(reversed(scheduler.running)):
                return None
            count = budget
        if count:
            free -= -(-(seq.computed + count) // size) - seq.held
            if free < 0:
                return None
            budget -= count
            chunks.append((seq, count))
    return chunks


def compute(scheduler: FastScheduler, seq: FastSequence, count: int, plan: Row) -> None:
    """Schedule a prefill chunk, for which there are tokens and blocks."""
    seq.computed += count
    held = -(-seq.computed // scheduler.block_size)
    if held > seq.held:
        scheduler.blocks.take(held - seq.held)
        seq.held = held
    if scheduler.cache is not None:
        scheduler.at_admission = seq.admission
        scheduler.cache.register(seq, seq.computed)
    describe_chunk(seq, count, plan)


def describe_chunk(seq: FastSequence, count: int, plan: Row) -> None:
    """Enter a chunk of `count` tokens, already counted as computed, into the plan."""
    computed = seq.computed
    if count == 1 and computed > seq.prompt_tokens:  # to the model no different from a decode
        plan.num_decodes += 1
        plan.context += computed
        plan.context_sq += computed * computed
    else:
        plan.prefills.append((count, computed - count))
    if computed == seq.known:
        plan.completing.append(seq)


def admit(scheduler: FastScheduler, budget: int, limit: int, plan: Row) -> None:
    """Admit waiting sequences in order until one does not fit."""
    rules, blocks, cache = scheduler.rules, scheduler.blocks, scheduler.cache
    waiting, running, size = scheduler.waiting, scheduler.running, scheduler.block_size
    scheduler.head_is_stuck = False
    scheduler.at_admission = NO_LIMIT
    while budget > 0 and scheduler.num_waiting and len(running) < rules.max_running:
        seq = waiting.peek()
        hit: Hit = []
        num_hit = 0
        available = blocks.free - rules.spare_blocks
        if running:
            available -= rules.watermark_blocks
        if cache is not None:
            hit = cache.find_hit(seq, seq.known)
            for extent, length in hit:
                num_hit += length
                if not extent.refs:
                    available -= length
        cached = num_hit * size
        missing = count = seq.known - cached
        if count > limit:
            count = limit
        if count > budget:
            if not rules.chunked:
                return
            count = budget
        if rules.whole_must_fit and -(-seq.known // size) - num_hit > available:
            scheduler.head_is_stuck = cache is None or not cache.watches(seq)
            return
        if -(-(cached + count) // size) - num_hit > available:
            if count == missing and not rules.threshold:  # else a smaller chunk might fit later
                scheduler.head_is_stuck = cache is None or not cache.watches(seq)
            return
        waiting.pop()
        scheduler.num_waiting -= 1
        scheduler.num_admissions += 1
        seq.admission = scheduler.num_admissions
        seq.stage = PREFILL
        running[seq] = None
        scheduler.prefilling.append(seq)
        record = seq.record
        if record.preemptions:
            record.recomputed_tokens += max(0, seq.was_computed - cached)
        else:
            record.cached_tokens = cached
            plan.admitted.append(seq)
        plan.cached_tokens += cached
        if cache is not None:
            cache.acquire(seq, hit)
        seq.computed = cached
        seq.held = num_hit
        compute(scheduler, seq, count, plan)
        scheduler.at_admission = NO_LIMIT
        budget -= count
