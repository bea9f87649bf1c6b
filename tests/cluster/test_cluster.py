"""The cluster around toy engines: order at one instant, the door, the way to and from a replica."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from policies.admission.always import Always
from policies.routing.round_robin import RoundRobin
from sim.cluster.arrivals import requests
from sim.cluster.clock import Clock, Rank
from sim.cluster.cluster import Cluster
from sim.engine.config import EngineConfig
from sim.errors import UserError
from sim.protocols import (
    Accept,
    AdmissionPolicy,
    ClusterView,
    Decision,
    Defer,
    Reject,
    RoutingPolicy,
)
from sim.request import Request, Trace
from tests.cluster.toy import ToyEngine, columns


class Cost:
    """Only the way to and from the engine."""

    def __init__(self, arrival_ns: int = 0) -> None:
        self.delay = arrival_ns

    def arrival_ns(self, prompt_tokens: int) -> int:
        return self.delay


def cluster_of(
    engines: Sequence[ToyEngine],
    admission: AdmissionPolicy | None = None,
    routing: RoutingPolicy | None = None,
    delay_ns: int = 0,
    timeout_ns: int | None = None,
) -> Cluster:
    return Cluster(
        Clock(),
        engines,
        EngineConfig(num_gpu_blocks=1001),
        Cost(delay_ns),  # type: ignore[arg-type]
        admission or Always(),
        routing or RoundRobin(),
        timeout_ns,
    )


def send(cluster: Cluster, *arrivals_ns: int, output: int = 1) -> None:
    for uid, at in enumerate(arrivals_ns):
        request = Request(uid, str(uid), at, 1, output)
        cluster.clock.alarm(at, Rank.ARRIVE, lambda _, r=request: cluster.enter(r))


def test_at_one_instant_arrivals_then_aborts_then_planning() -> None:
    engine = ToyEngine(step_ns=10)
    cluster = cluster_of([engine])
    # set in the wrong order on purpose: the step ends at 10, where two arrive and one is aborted
    cluster.clock.alarm(10, Rank.ABORT, lambda _: cluster.abort(2))
    send(cluster, 0, 10, 10)
    cluster.clock.run()
    at_ten = [call for call in engine.calls if call[0] == 10]
    assert at_ten == [(10, "submit", 1), (10, "submit", 2), (10, "abort", 2), (10, "advance", 1)]


def test_equal_arrivals_keep_trace_order() -> None:
    engine = ToyEngine(slots=2)
    cluster = cluster_of([engine])
    send(cluster, 5, 5, 5, 5)
    cluster.clock.run()
    assert [uid for _, what, uid in engine.calls if what == "submit"] == [0, 1, 2, 3]


def test_engine_sees_a_request_after_its_way_there() -> None:
    engine = ToyEngine(step_ns=10)
    cluster = cluster_of([engine], delay_ns=7)
    send(cluster, 100)
    cluster.clock.run()
    rows = columns(cluster)
    assert rows["arrival_ns"] == [100]
    assert rows["queued_ns"] == [107]
    assert rows["finish_ns"] == [117]


def test_routing_counts_requests_that_are_still_on_their_way() -> None:
    cluster = cluster_of([ToyEngine(), ToyEngine()], delay_ns=1000)
    send(cluster, 0, 0, 0)
    cluster.clock.run(500)
    assert cluster.num_requests == (2, 1)
    assert [replica.num_requests for replica in cluster.replicas] == [2, 1]
    assert {record.request.uid for record, _ in cluster.inside()} == {0, 1, 2}


def test_timeout_aborts_waiting_and_running_requests() -> None:
    cluster = cluster_of([ToyEngine(step_ns=10, slots=1)], timeout_ns=25)
    send(cluster, 0, 0, 0, output=2)
    cluster.clock.run()
    rows = columns(cluster)
    assert rows["status"] == ["completed", "aborted", "aborted"]
    assert rows["reason"] == ["", "timeout", "timeout"]
    assert rows["finish_ns"] == [20, 25, 25]
    assert rows["output_tokens"] == [2, 0, 0]


def test_abort_on_the_way_never_reaches_the_engine() -> None:
    engine = ToyEngine()
    cluster = cluster_of([engine], delay_ns=50)
    send(cluster, 0)
    cluster.clock.alarm(10, Rank.ABORT, lambda _: cluster.abort(0))
    cluster.clock.run()
    assert engine.calls == []
    assert columns(cluster)["status"] == ["aborted"]
    assert columns(cluster)["reason"] == ["client"]
    assert cluster.num_requests == (0,)


def test_abort_of_a_request_that_left_does_nothing() -> None:
    cluster = cluster_of([ToyEngine(step_ns=10)])
    send(cluster, 0)
    cluster.clock.alarm(10, Rank.ABORT, lambda _: None)
    cluster.clock.alarm(11, Rank.ABORT, lambda _: cluster.abort(0))
    cluster.clock.run()
    assert columns(cluster)["status"] == ["completed"]


class Gate(AdmissionPolicy):
    """One request at a time."""

    def decide(self, request: Request, view: ClusterView) -> Decision:
        return Accept() if sum(view.num_requests) == 0 else Defer()


def test_deferred_requests_enter_in_order_when_others_leave() -> None:
    cluster = cluster_of([ToyEngine(step_ns=10)], admission=Gate())
    send(cluster, 0, 1, 2)
    cluster.clock.run()
    rows = columns(cluster)
    assert rows["status"] == ["completed"] * 3
    assert rows["queued_ns"] == [0, 10, 20]
    assert rows["arrival_ns"] == [0, 1, 2]


class Later(AdmissionPolicy):
    def decide(self, request: Request, view: ClusterView) -> Decision:
        return Accept() if view.now_ns >= 100 else Defer(until_ns=100)


def test_deferring_until_a_time() -> None:
    cluster = cluster_of([ToyEngine(step_ns=3)], admission=Later(), timeout_ns=95)
    send(cluster, 0, 10)
    cluster.clock.run()
    rows = columns(cluster)
    assert rows["status"] == ["aborted", "completed"]  # the first client waits only until 95
    assert rows["queued_ns"] == [-1, 100]


class Never(AdmissionPolicy):
    def decide(self, request: Request, view: ClusterView) -> Decision:
        return Defer()


def test_requests_held_for_ever_are_unfinished_not_lost() -> None:
    cluster = cluster_of([ToyEngine()], admission=Never())
    send(cluster, 0, 10)
    cluster.clock.run()
    assert [(record.status.value, record.reason) for record, _ in cluster.inside()] == [
        ("unfinished", "deferred")
    ] * 2


class Past(AdmissionPolicy):
    def decide(self, request: Request, view: ClusterView) -> Decision:
        return Defer(until_ns=view.now_ns)


class Off(RoutingPolicy):
    def choose(self, request: Request, view: ClusterView) -> int:
        return 2


@pytest.mark.parametrize(
    ("admission", "routing", "message"),
    [(Past(), None, "not later than now"), (None, Off(), "chose replica 2 .* there are 2")],
)
def test_impossible_decisions_are_errors(
    admission: AdmissionPolicy | None, routing: RoutingPolicy | None, message: str
) -> None:
    cluster = cluster_of([ToyEngine(), ToyEngine()], admission, routing)
    send(cluster, 3)
    with pytest.raises(UserError, match=message):
        cluster.clock.run()


class Refuse(AdmissionPolicy):
    def decide(self, request: Request, view: ClusterView) -> Decision:
        return Reject("no-reason")


def test_rejections_at_the_door_are_counted_with_their_reason() -> None:
    cluster = cluster_of([ToyEngine()], admission=Refuse())
    send(cluster, 3)
    cluster.clock.run()
    rows = columns(cluster)
    assert (rows["status"], rows["reason"], rows["replica"]) == (["rejected"], ["no-reason"], [-1])


def test_alarms_stop_at_the_given_time_and_go_on_from_there() -> None:
    clock = Clock()
    rung: list[int] = []
    for at in (30, 10, 20, 20):
        clock.alarm(at, Rank.PLAN, lambda _, at=at: rung.append(at))
    clock.run(until_ns=20)
    assert rung == [10, 20, 20]
    assert clock.now_ns == 20
    clock.run(until_ns=20)
    clock.run()
    assert rung == [10, 20, 20, 30]


def test_requests_of_a_trace_are_those_of_its_rows() -> None:
    import numpy as np

    n = 5000  # more than one chunk
    trace = Trace(
        "t",
        "columns",
        np.arange(n),
        np.arange(n) + 1,
        np.arange(n) + 2,
        priority=np.arange(n) % 3,
        tenant=[f"t{i}" for i in range(n)],
    )
    assert list(requests(trace)) == list(trace)


class Books(RoutingPolicy):
    """Prompt tokens held by each replica, by its own account."""

    def __init__(self) -> None:
        self.tokens = [0, 0]

    def choose(self, request: Request, view: ClusterView) -> int:
        index = self.tokens.index(min(self.tokens))
        self.tokens[index] += request.prompt_tokens
        return index

    def on_leave(self, request: Request, replica: int) -> None:
        self.tokens[replica] -= request.prompt_tokens


def test_a_policy_that_keeps_books_is_told_who_leaves() -> None:
    books = Books()
    cluster = cluster_of([ToyEngine(step_ns=10), ToyEngine(step_ns=10)], routing=books)
    send(cluster, 0, 1, 2, 30)
    cluster.clock.run(5)
    assert books.tokens == [2, 1]
    cluster.clock.run()
    assert books.tokens == [0, 0]
    assert columns(cluster)["replica"] == [0, 1, 0, 0]
