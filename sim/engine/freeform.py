"""Carrying out a plan that a policy has spelled out."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import TYPE_CHECKING

from sim.engine.plan import Budget, StepPlan
from sim.engine.sequence import Sequence, Stage
from sim.errors import UserError
from sim.protocols import Plan

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler


def follow(wish: Plan, scheduler: Scheduler, plan: StepPlan, budget: Budget) -> None:
    """Make `wish` the step's `plan`, up to the first entry that the KV blocks cannot hold.

    UserError, naming the policy, for a plan that makes no sense.
    """
    here: dict[int, Sequence] = {id(seq): seq for seq in (*scheduler.waiting, *scheduler.running)}
    name = scheduler.rules.name

    def known(request: object) -> Sequence:
        seq = here.get(id(request))
        if seq is None:
            raise UserError(f"policy {name} plans {request!r}, which neither waits nor runs")
        return seq

    _check_form(wish, name)
    for request in wish.preempt:
        seq = known(request)
        if seq.stage is not Stage.RUNNING:
            raise UserError(f"policy {name} preempts {seq.id}, which does not run")
        scheduler.rules.check_patience(seq)
        scheduler.running.remove(seq)
        scheduler.preempt(seq, plan)

    admitted: list[tuple[Sequence, int]] = []
    for request, num_tokens in wish.schedule:
        seq = known(request)
        if seq in plan.seqs or any(seq is other for other, _ in admitted):
            raise UserError(f"policy {name} schedules {seq.id} twice in one step")
        if seq.stage is not Stage.RUNNING:
            admitted.append((seq, num_tokens))
            continue
        if admitted:
            raise UserError(f"policy {name} schedules {seq.id}, which runs, after an admission")
        if not _continue(scheduler, seq, num_tokens, plan, budget):
            return
    for seq, num_tokens in admitted:
        if not _admit(scheduler, seq, num_tokens, plan, budget):
            return


def _check_form(wish: object, name: str) -> None:
    """UserError for what is no Plan, or has no requests and counts where they belong."""
    if not isinstance(wish, Plan):
        raise UserError(f"policy {name}: plan() gave {wish!r}, neither a Plan nor None")
    for what in (wish.preempt, wish.schedule):
        if not isinstance(what, Iterable):
            raise UserError(f"policy {name}: a Plan has lists of requests, not {what!r}")
    for entry in wish.schedule:
        if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[1], Integral):
            raise UserError(
                f"policy {name} schedules {entry!r}, which is not (request, num_new_tokens)"
            )


def _continue(
    scheduler: Scheduler, seq: Sequence, num_tokens: int, plan: StepPlan, budget: Budget
) -> bool:
    computed = seq.num_computed_tokens
    known = seq.num_tokens + seq.num_drafts + seq.num_placeholders - computed
    _check(scheduler, seq, num_tokens, known, budget)
    if not scheduler.cache.allocate(seq, num_tokens):
        return False
    plan.add(seq, num_tokens, computed)
    plan.num_running += 1
    budget.take(num_tokens)
    drafts = computed + num_tokens - seq.num_tokens - seq.num_placeholders
    if drafts > 0:
        plan.drafts[seq] = drafts
    seq.num_drafts = 0
    return True


def _admit(
    scheduler: Scheduler, seq: Sequence, num_tokens: int, plan: StepPlan, budget: Budget
) -> bool:
    hit = scheduler.cache.find_hit(seq)
    computed = len(hit) * scheduler.cache.block_size
    _check(scheduler, seq, num_tokens, seq.num_tokens - computed, budget)
    if len(scheduler.running) >= scheduler.config.max_num_seqs:
        raise UserError(
            f"policy {scheduler.rules.name} runs more than max_num_seqs "
            f"({scheduler.config.max_num_seqs}) requests"
        )
    if seq.num_stale or not scheduler.admit(seq, hit, num_tokens):
        return False
    scheduler.waiting.remove(seq)
    scheduler.start(seq, plan, budget, num_tokens, computed)
    return True


def _check(
    scheduler: Scheduler, seq: Sequence, num_tokens: int, known: int, budget: Budget
) -> None:
    name = scheduler.rules.name
    if not 1 <= num_tokens <= known:
        raise UserError(
            f"policy {name} schedules {num_tokens} tokens of {seq.id}, which has {known} to compute"
        )
    if num_tokens > budget.left:
        raise UserError(
            f"policy {name} schedules more tokens in a step than max_num_batched_tokens "
            f"({scheduler.config.max_num_batched_tokens})"
        )
