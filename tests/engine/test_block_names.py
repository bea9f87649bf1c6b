"""Names of block contents: equal exactly when all tokens up to the block's end are equal."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.block_names import BlockNames
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence
from sim.request import Request, Segment
from tests.conformance.harness import Run, engine_config

CASES = Path(__file__).parents[1] / "conformance" / "cases"

segments = st.lists(
    st.builds(
        Segment,
        content=st.integers(0, 1),
        start=st.integers(0, 3),
        length=st.integers(0, 6),
    ),
    min_size=1,
    max_size=5,
)
requests = st.lists(
    st.tuples(segments, st.sampled_from([None, "a"]), st.integers(0, 5)), min_size=1, max_size=6
)


def expand(parts):
    return [(s.content, s.start + i) for s in parts for i in range(s.length)]


def sequence(uid, parts, salt):
    length = sum(part.length for part in parts)
    request = Request(uid, str(uid), 0, length, 99, segments=tuple(parts), cache_salt=salt)
    return Sequence(request)


@given(requests, st.integers(1, 4), st.integers(0, 1))
def test_names_are_equal_exactly_when_prefixes_are(drawn, block_size, lookahead):
    names = BlockNames(block_size, lookahead)
    seen: dict[tuple, int] = {}
    for uid, (parts, salt, outputs) in enumerate(drawn):
        seq = sequence(uid, parts, salt)
        names.extend(seq)
        for _ in range(outputs):  # tokens arrive one by one
            seq.num_tokens += 1
            seq.num_output_tokens += 1
            names.extend(seq)
        tokens = expand([*parts, seq.output_text()])
        assert len(seq.block_names) == max(0, (len(tokens) - lookahead) // block_size)
        for i, name in enumerate(seq.block_names):
            prefix = (salt, i, tuple(tokens[: (i + 1) * block_size + lookahead]))
            assert seen.setdefault(prefix, name) == name
    assert len(set(seen.values())) == len(seen)


def test_a_sweep_keeps_what_is_held_and_its_prefixes():
    names = BlockNames(2, sweep_at=1)
    old = sequence(0, [Segment(7, 0, 8)], None)
    new = sequence(1, [Segment(8, 0, 4)], None)
    names.extend(old)
    names.extend(new)
    assert len(names) == 6
    assert names.wants_sweep
    names.sweep([old.block_names[2]])
    assert len(names) == 3
    again = sequence(2, [Segment(7, 0, 8)], None)
    names.extend(again)
    assert again.block_names[:3] == old.block_names[:3]
    assert again.block_names[3] != old.block_names[3]  # forgotten, so it is new


@pytest.mark.parametrize("name", ["18_multi_turn", "19_lru_eviction", "67_fuzz_async_a"])
def test_sweeping_all_the_time_changes_no_schedule(name):
    case = json.loads((CASES / f"{name}.case.json").read_text())
    config = engine_config(case)
    scheduler = Scheduler(config)
    names = BlockNames(config.block_size, config.hash_lookahead, sweep_at=0)
    scheduler.cache.names = names
    run = Run(case, check=True, scheduler=scheduler).run()
    assert run.document() == (CASES / f"{name}.expected.json").read_text()
    limit = 2 * (config.num_blocks + sum(len(r["prompt"]) for r in case["requests"])) + 200
    assert len(names) < limit
