"""What a user may swap: the protocols of scheduling, eviction, admission and routing policies.

A policy looks at a read-only view and returns a decision; the replica or the cluster applies it
and keeps the books. A policy is a plain class; when it is a dataclass its fields are its options
(`--set policy.NAME=VALUE`). One scheduling and one eviction policy object serve one replica, one
admission and one routing policy object serve the cluster, so a policy may keep state of its own.

Every hook of a base class here has a default that means "as vLLM does", so a policy overrides
only what it changes. Times are integer nanoseconds, token and block counts are ints.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from sim.request import Request

if TYPE_CHECKING:
    from sim.engine.config import EngineConfig

# --- scheduling: which requests of one replica run in the next step ------------------------------

Compose = Literal["mixed", "prefill-first", "whole-batch"]
Order = Literal["fcfs", "key", "key-each-step"]
Reserve = Literal["on-demand", "prompt", "declared", "max", "pow2", "oracle"]
Layout = Literal["paged", "contiguous", "buddy"]
Preempt = Literal["recompute", "swap"]


class RequestView(Protocol):
    """One request inside a replica, as its scheduler sees it now."""

    @property
    def request(self) -> Request:
        """What the client sent. Only oracles may look at its `output_tokens`."""
        ...

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and the tokens generated so far."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV entries exist (or are being computed): 0 while waiting."""
        ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def num_preemptions(self) -> int: ...


class SchedulerView(Protocol):
    """One replica's scheduler when a step is planned. The sequences must not be changed."""

    @property
    def now_ns(self) -> int:
        """When this step is planned."""
        ...

    @property
    def config(self) -> EngineConfig: ...

    @property
    def waiting(self) -> Sequence[RequestView]:
        """In the order in which they would be admitted."""
        ...

    @property
    def running(self) -> Sequence[RequestView]:
        """In the order in which they were admitted."""
        ...

    @property
    def num_blocks(self) -> int:
        """Usable KV blocks of the replica."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones that nobody uses included."""
        ...

    def cached_tokens(self, request: RequestView) -> int:
        """Length of the request's longest prefix in the cache now. Changes nothing."""
        ...

    def blocks_needed(self, request: RequestView, num_new_tokens: int) -> int:
        """Free blocks that scheduling `num_new_tokens` more of the request would take."""
        ...


class Limits(NamedTuple):
    """Bounds of one step."""

    max_num_batched_tokens: int
    """Token budget."""
    max_num_seqs: int
    """Most requests running at a time."""


@dataclass(slots=True)
class Plan:
    """A step, spelled out by a policy that wants full control.

    `preempt` is done first, in order. Then each `(request, num_new_tokens)` of `schedule`, in
    order; a waiting request named here is admitted. The replica stops at the first entry that its
    KV blocks cannot hold (it preempts nobody on its own) and raises UserError for an entry that
    is neither waiting nor running, named twice, or beyond the request's known tokens.
    """

    schedule: Sequence[tuple[RequestView, int]]
    preempt: Sequence[RequestView] = ()


class SchedulingPolicy:
    """Who runs in the next step of a replica. The defaults are vLLM V1's FCFS scheduler.

    The class attributes *declare* the policy; what is declared runs at full speed. The methods
    refine it; a method left alone costs nothing. Subclass as a dataclass; an attribute annotated
    in the subclass becomes an option, one that is only assigned does not.
    """

    compose: Compose = "mixed"
    """What a step holds.
    `mixed`: running requests in order of admission, decodes and prefill chunks alike, then as
    many waiting ones as the token budget, the slots and the KV blocks allow (vLLM V1, Sarathi,
    Orca).
    `prefill-first`: waiting requests that fit make a step of prefills alone, else all running
    requests decode (vLLM V0).
    `whole-batch`: when nothing runs a batch opens and waiting requests join it, in as many steps
    of prefills alone as the token budget takes; it closes with the first step that nobody can
    join (for want of requests, slots or KV blocks) and decodes to its end. One that finishes
    early keeps its slot and its KV reservation until the whole batch has finished
    (FasterTransformer)."""

    chunked_prefill: bool | None = None
    """May a prompt be spread over steps. None: as the user set the engine. A bool decides: the
    engine's `enable_chunked_prefill` is set to it (False brings vLLM's token budget of at least
    `max_model_len`, so that every prompt fits a step)."""

    order: Order = "fcfs"
    """Order of the waiting queue. `fcfs`: arrival; preempted requests return to the front.
    `key`: smallest `key` first, computed when a request is queued (again); ties by arrival, then
    id. `key-each-step`: the same, computed anew for every admission (slow, for keys that move)."""

    reserve: Reserve = "on-demand"
    """KV blocks set aside when a request is admitted, for: `on-demand` what the step computes
    (and the engine's check that the known tokens would fit now); `prompt` all known tokens;
    `declared` prompt + the client's `max_tokens`; `max` the engine's `max_model_len`; `pow2`
    prompt + the true output rounded up to a power of two; `oracle` prompt + the true output.
    Later tokens beyond the reservation take blocks on demand."""

    layout: Layout = "paged"
    """`paged`: any free blocks. `contiguous`: the reservation is one run of neighbouring blocks,
    first fit. `buddy`: the same, rounded up to a power of two blocks (as in Orca's evaluation by
    the PagedAttention paper). Without pages there is no prefix cache."""

    preempt: Preempt = "recompute"
    """What happens to the KV blocks of a preempted request: dropped and recomputed, or moved to
    host memory and back."""

    watermark: float | None = None
    """Fraction of blocks an admission must leave free. None: as the engine's `watermark`, which
    vLLM V1 applies only while something runs; a number is applied always, as in vLLM V0."""

    def prepare(self, rng: np.random.Generator) -> None:
        """Called once before the first request; `rng` is this policy's own random stream."""

    def key(self, request: RequestView, view: SchedulerView) -> Any:
        """Sort key for `order` other than `fcfs`: any values that compare; smallest first."""
        return 0

    def victim(self, view: SchedulerView) -> RequestView | None:
        """Whom to preempt now that a running request lacks a block. None: the last in order,
        that is the last of `running` under `fcfs`, the largest (key, arrival) otherwise."""
        return None

    def displace(self, view: SchedulerView) -> Sequence[RequestView]:
        """Running requests to preempt before this step, in favour of better waiting ones."""
        return ()

    def limits(self, view: SchedulerView) -> Limits | None:
        """Bounds of this step. None: the engine's `max_num_batched_tokens` and `max_num_seqs`."""
        return None

    def on_admit(self, request: RequestView, view: SchedulerView) -> None:
        """`request` has just been admitted (again, if it was preempted)."""

    def on_tokens(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """Service that `tenant` received since the last call: prompt tokens computed and tokens
        generated, summed over its requests and over any number of steps."""

    def plan(self, view: SchedulerView) -> Plan | None:
        """The whole next step, freely (it may be empty, and nobody may be there). None: what is
        declared above."""
        return None

    def steady(self, view: SchedulerView) -> bool:
        """True: while nothing arrives, finishes or lacks a block, the next decision would be the
        same, so steps may be merged. False for policies that look at the clock or at progress."""
        return True


# --- eviction: which cached block goes when a free one is needed ---------------------------------


class BlockView(Protocol):
    """A cached KV block that no request uses. The counters are the replica's own sequence
    numbers: larger is later."""

    @property
    def content(self) -> Hashable:
        """Identity of the tokens in the block and of all before it."""
        ...

    @property
    def depth(self) -> int:
        """Blocks before it in its prefix."""
        ...

    @property
    def cached_seq(self) -> int:
        """When its content was registered in the cache."""
        ...

    @property
    def freed_seq(self) -> int:
        """When its last user let go of it; the blocks of one request count from its last block
        to its first."""
        ...

    @property
    def num_hits(self) -> int:
        """Requests that found it in the cache."""
        ...


class EvictionPolicy:
    """Which cached, unused block is dropped first. Blocks without content always go before."""

    free_queue: bool = False
    """True: exactly vLLM's free queue, least recently freed first; `order` is then not asked."""

    def prepare(self, rng: np.random.Generator) -> None:
        """Called once before the first request; `rng` is this policy's own random stream."""

    def order(self, block: BlockView) -> Any:
        """Sort key of the block when it becomes unused; the smallest goes first."""
        return block.freed_seq


# --- admission and routing: the cluster's front door ---------------------------------------------


class ReplicaView(Protocol):
    """One replica from outside, now."""

    @property
    def index(self) -> int: ...

    @property
    def num_requests(self) -> int:
        """Requests sent there that have not left, those on their way included."""
        ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def kv_usage(self) -> float:
        """Fraction of its KV blocks that requests hold."""
        ...

    @property
    def num_blocks(self) -> int:
        """Usable KV blocks."""
        ...

    @property
    def config(self) -> EngineConfig: ...


class ClusterView(Protocol):
    """All replicas, now."""

    @property
    def now_ns(self) -> int: ...

    @property
    def replicas(self) -> Sequence[ReplicaView]: ...

    @property
    def num_requests(self) -> Sequence[int]:
        """`num_requests` of each replica, in order: the quick way to the least loaded one."""
        ...


class Accept(NamedTuple):
    """Let the request in."""


class Reject(NamedTuple):
    """Turn the request away; counted under `reason` (a short word, not a sentence)."""

    reason: str


class Defer(NamedTuple):
    """Hold the request at the door and ask again."""

    until_ns: int | None = None
    """At that time (later than now); None: when the next request leaves the cluster."""


Decision = Accept | Reject | Defer


class AdmissionPolicy:
    """Which requests may enter the cluster."""

    def prepare(self, rng: np.random.Generator) -> None:
        """Called once before the first request; `rng` is this policy's own random stream."""

    def decide(self, request: Request, view: ClusterView) -> Decision:
        """Asked when `request` arrives, and again after `Defer`. Must not look at the request's
        `output_tokens`, which no front door knows."""
        return Accept()

    def on_leave(self, request: Request, replica: int) -> None:
        """An admitted request has left `replica`, whatever way: for policies that keep books."""


class RoutingPolicy:
    """Which replica serves a request."""

    def prepare(self, rng: np.random.Generator) -> None:
        """Called once before the first request; `rng` is this policy's own random stream."""

    def choose(self, request: Request, view: ClusterView) -> int:
        """Index of the replica for `request`, which has been admitted."""
        raise NotImplementedError(f"{type(self).__name__} must define choose(request, view)")

    def on_leave(self, request: Request, replica: int) -> None:
        """A routed request has left `replica`, whatever way: for policies that keep books."""


Policy = SchedulingPolicy | EvictionPolicy | AdmissionPolicy | RoutingPolicy


def overrides(policy: Policy, hook: str) -> bool:
    """Does this policy define the hook itself, rather than inherit the base class's?"""
    bases = (SchedulingPolicy, EvictionPolicy, AdmissionPolicy, RoutingPolicy)
    own = getattr(type(policy), hook)
    return all(getattr(base, hook, None) is not own for base in bases)
