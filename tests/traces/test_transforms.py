"""Parts of traces keep what belongs together, and private texts stay private."""

from __future__ import annotations

import numpy as np
import pytest

import traces
from sim.errors import UserError
from sim.request import Segment, Trace, output_key, prompt_key

SPEC = "constant:rate=2,n=10,prompt=uniform(1,99),output=5,system=prompts(3,16,share=0.5)"


@pytest.fixture
def trace() -> Trace:
    return traces.generate(SPEC + ",tenants=mix(a=1,b=1),priorities=mix(1=1,2=1)", 3)


def facts(trace: Trace) -> list[tuple[object, ...]]:
    """Each request but for its number, its private text renamed."""
    return [
        (
            request.prompt_tokens,
            request.output_tokens,
            request.tenant,
            request.priority,
            tuple(
                part._replace(content="own") if part.content == prompt_key(request.uid) else part
                for part in request.prompt_segments()
            ),
        )
        for request in trace
    ]


def test_limit_keeps_the_first_requests(trace):
    part = traces.limit(trace, 4)
    assert facts(part) == facts(trace)[:4]
    assert part.arrival_ns.tolist() == trace.arrival_ns[:4].tolist()
    assert part.counts == {"requests_generated": 10, "rows_over_limit": 6}
    assert traces.limit(trace, 10) is trace
    with pytest.raises(UserError, match="at least 1"):
        traces.limit(trace, 0)


def test_window_shifts_time_and_renames_private_texts(trace):
    part = traces.window(trace, 1.5, 4)
    assert part.arrival_ns.tolist() == [0, 5 * 10**8, 10**9, 15 * 10**8, 2 * 10**9]
    assert facts(part) == facts(trace)[3:8]
    assert part.counts["rows_outside_window"] == 5
    assert facts(traces.window(trace, None, 1)) == facts(trace)[:2]
    with pytest.raises(UserError, match=r"span 0 to 4\.500 s"):
        traces.window(trace, 5)


def test_scale_rate_divides_times(trace):
    assert traces.scale_rate(trace, 3).arrival_ns[:3].tolist() == [0, 166_666_667, 333_333_333]
    assert facts(traces.scale_rate(trace, 3)) == facts(trace)
    assert traces.scale_rate(trace, 1) is trace


def test_with_arrivals_keeps_the_order(trace):
    timed = traces.with_arrivals(trace, traces.Poisson(4), 5)
    assert facts(timed) == facts(trace)
    expected = traces.Poisson(4).first(10, np.random.default_rng(5))
    assert timed.arrival_ns.tolist() == expected.tolist()


def test_take_follows_texts_named_by_other_requests():
    segments = [
        (Segment(prompt_key(0), 0, 3),),
        (Segment(7, 0, 2), Segment(prompt_key(1), 0, 1)),
        # a second turn: the first prompt, its answer, then new text
        (Segment(prompt_key(0), 0, 3), Segment(output_key(0), 0, 2), Segment(prompt_key(2), 0, 1)),
        (Segment(prompt_key(1), 0, 1), Segment(output_key(1), 0, 2)),
    ]
    column = np.arange(4)
    trace = Trace("t", "test", column, column + 1, column + 1, segments)
    assert list(traces.take(trace, np.array([0, 2])).segments) == [
        (Segment(prompt_key(0), 0, 3),),
        (Segment(prompt_key(0), 0, 3), Segment(output_key(0), 0, 2), Segment(prompt_key(1), 0, 1)),
    ]
    # requests 0 and 1 are gone: what they said stays equal among those that quote it, not private
    second, third = traces.take(trace, np.array([2, 3])).segments
    assert second[2] == Segment(prompt_key(0), 0, 1)
    quoted = [second[0].content, second[1].content, third[0].content, third[1].content]
    assert len(set(quoted)) == 4
    assert min(quoted) >= 0
