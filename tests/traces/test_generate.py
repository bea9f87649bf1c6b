"""Generated traces have the statistics that were asked for, and the same seed the same trace."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from scipy import stats

import traces
from sim.errors import UserError
from sim.request import Segment, prompt_key
from traces import arrivals, lengths, workload

SPEC = "poisson:rate=8,n=20000,prompt=lognormal(1020,2735),output=lognormal(129,424)"


def wrong(description: object) -> str:
    with pytest.raises(UserError) as caught:
        traces.generate(description, 0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def columns(trace) -> dict[str, object]:
    return {
        "arrival": trace.arrival_ns.tolist(),
        "prompt": trace.prompt_tokens.tolist(),
        "output": trace.output_tokens.tolist(),
        "segments": None if trace.segments is None else list(trace.segments),
        "tenant": trace.tenant,
        "priority": None if trace.priority is None else trace.priority.tolist(),
    }


def test_poisson_gaps_and_lognormal_lengths():
    trace = traces.generate(SPEC, 1)
    gaps = np.diff(trace.arrival_ns) / 1e9
    assert stats.kstest(gaps, stats.expon(scale=1 / 8).cdf).pvalue > 0.01
    for tokens, median, p90 in ((trace.prompt_tokens, 1020, 2735), (trace.output_tokens, 129, 424)):
        assert np.median(tokens) == pytest.approx(median, rel=0.03)
        assert np.quantile(tokens, 0.9) == pytest.approx(p90, rel=0.04)
        assert tokens.min() >= 1
    assert np.corrcoef(trace.prompt_tokens, trace.output_tokens)[0, 1] < 0.03
    assert trace.format == "generated"
    assert trace.name == SPEC
    assert trace.counts == {"requests_generated": 20_000}


@pytest.mark.parametrize("cv", [0.2, 1, 4])
def test_gamma_gaps(cv):
    trace = traces.generate(f"gamma:rate=50,cv={cv},n=50000,prompt=1,output=1", 2)
    gaps = np.diff(trace.arrival_ns) / 1e9
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.04)


def test_constant_arrivals_do_not_drift():
    trace = traces.generate("constant:rate=3,n=100001,prompt=1,output=1", 0)
    assert trace.arrival_ns[:4].tolist() == [0, 333_333_333, 666_666_667, 10**9]
    assert trace.arrival_ns[99_999] == 33_333 * 10**9
    within = traces.generate("constant:rate=4,duration_s=2,prompt=1,output=1", 0)
    assert within.arrival_ns.tolist() == [250_000_000 * i for i in range(8)]


@pytest.mark.parametrize("process", ["poisson:rate=8", "gamma:rate=8,cv=3"])
def test_duration_gives_all_arrivals_before_it(process):
    long = traces.generate(f"{process},n=30000,prompt=1,output=1", 5).arrival_ns
    for seconds in (0.5, 10, 1000):
        part = traces.generate(f"{process},duration_s={seconds},prompt=1,output=1", 5).arrival_ns
        assert part.tolist() == long[long < seconds * 10**9].tolist()


def test_same_seed_same_trace_and_streams_are_apart():
    full = f"{SPEC},system=prompts(4,uniform(9,99),zipf=1,share=0.5),tenants=mix(a=1,b=3)"
    full = full.replace("20000", "300") + ",priorities=mix(0=1,5=1)"
    first = columns(traces.generate(full, 7))
    assert columns(traces.generate(full, 7)) == first
    assert columns(traces.generate(full, np.random.default_rng(7))) == first
    assert columns(traces.generate(full, 8))["arrival"] != first["arrival"]
    faster = columns(traces.generate(full.replace("rate=8", "rate=16"), 7))
    assert {key for key in first if first[key] != faster[key]} == {"arrival"}
    assert np.allclose(np.array(faster["arrival"]) * 2, first["arrival"], atol=2)
    longer = columns(traces.generate(full.replace("n=300", "n=500"), 7))
    assert longer["arrival"][:300] == first["arrival"]
    assert longer["output"][:300] == first["output"]


def test_fixed_and_uniform_lengths():
    trace = traces.generate("constant:rate=1,n=5000,prompt=uniform(3,5),output=fixed(7)", 0)
    values, counts = np.unique(trace.prompt_tokens, return_counts=True)
    assert values.tolist() == [3, 4, 5]
    assert counts.min() > 1500
    assert set(trace.output_tokens.tolist()) == {7}


def test_only_bounds_that_are_given_clip_and_that_is_counted():
    spec = "constant:rate=1,n=5000,prompt=lognormal(100,1000{}),output=1"
    free = traces.generate(spec.format(""), 3)
    bounded = traces.generate(spec.format(",min=50,max=2000"), 3)
    tokens = np.clip(free.prompt_tokens, 50, 2000)
    assert bounded.prompt_tokens.tolist() == tokens.tolist()
    assert bounded.counts["prompts_clipped"] == np.count_nonzero(tokens != free.prompt_tokens)
    assert free.prompt_tokens.max() > 10_000
    assert "prompts_clipped" not in free.counts


def test_empirical_pairs_stay_together():
    sample = traces.load(traces.sample_path())
    observed = set(zip(sample.prompt_tokens.tolist(), sample.output_tokens.tolist(), strict=True))
    trace = traces.generate(
        f"constant:rate=1,n=3000,lengths=empirical('{traces.sample_path()}')", 0
    )
    drawn = set(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))
    assert drawn <= observed
    assert len(drawn) > 1000
    mixed = traces.generate(
        f"constant:rate=1,n=3000,prompt=empirical('{traces.sample_path()}'),output=5", 0
    )
    assert set(mixed.prompt_tokens.tolist()) <= {p for p, _ in observed}


def test_empirical_from_a_file_without_arrivals(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("in,out\n5,6\n7,8\n")
    spec = f"constant:rate=1,n=50,lengths=empirical('{path}',columns='prompt=in,output=out')"
    trace = traces.generate(spec, 0)
    assert set(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)) == {
        (5, 6),
        (7, 8),
    }


def test_system_prompts_are_shared_text_before_a_private_one():
    trace = traces.generate("constant:rate=1,n=4000,prompt=10,output=1,system=4x512", 0)
    assert set(trace.prompt_tokens.tolist()) == {522}
    uses = np.bincount([parts[0].content for parts in trace.segments])
    assert stats.chisquare(uses).pvalue > 0.01
    content = trace.segments[9][0].content
    assert trace.segments[9] == (Segment(content, 0, 512), Segment(prompt_key(9), 0, 10))


def test_system_prompts_of_many_lengths_by_popularity_for_a_share():
    system = "prompts(3,uniform(100,900),zipf=1,share=0.6)"
    trace = traces.generate(f"constant:rate=1,n=11000,prompt=10,output=1,system={system}", 4)
    used = [parts[0] for parts in trace.segments if len(parts) == 2]
    assert len(used) == pytest.approx(6600, rel=0.05)
    assert len({part.length for part in used}) == 3
    uses = np.bincount([part.content for part in used])
    assert stats.chisquare(uses, np.array([6, 3, 2]) / 11 * len(used)).pvalue > 0.01
    for request in trace:
        assert sum(part.length for part in request.prompt_segments()) == request.prompt_tokens


def test_tenants_and_priorities_by_share():
    trace = traces.generate(f"{SPEC},tenants=mix(gold=1,free=3),priorities=mix(-1=0.1,0=0.9)", 0)
    assert trace.tenant.count("gold") == pytest.approx(5000, rel=0.05)
    assert np.count_nonzero(trace.priority == -1) == pytest.approx(2000, rel=0.08)
    assert set(trace.priority.tolist()) == {-1, 0}


def test_mapping_and_python_say_the_same_as_text():
    text = "gamma:rate=2,cv=2,n=50,prompt=lognormal(10,20,max=30),output=uniform(1,5),system=2x64"
    text += ",tenants=mix(a=1,b=1),priorities=mix(0=1,3=2)"
    mapping = {
        "arrivals": "gamma",
        "rate": 2,
        "cv": 2.0,
        "n": 50,
        "prompt": {"lognormal": {"median": 10, "p90": 20, "max": 30}},
        "output": {"uniform": [1, 5]},
        "system": {"prompts": {"prompts": 2, "length": 64}},
        "tenants": {"a": 1, "b": 1},
        "priorities": {0: 1, 3: 2},
    }
    python = traces.Workload(
        arrivals=traces.Gamma(rate=2, cv=2),
        lengths=(traces.Lognormal(10, 20, max=30), traces.Uniform(1, 5)),
        n=50,
        system=traces.SystemPrompts(2, traces.Fixed(64)),
        tenants={"a": 1, "b": 1},
        priorities={0: 1, 3: 2},
    )
    expected = columns(traces.generate(text, 1))
    assert columns(traces.generate(mapping, 1)) == expected
    assert columns(traces.generate(python, 1)) == expected


def test_a_million_requests_take_about_a_second():
    start = time.process_time()
    spec = f"{SPEC},system=4x512".replace("20000", "1e6")
    trace = traces.generate(spec, 0)
    took = time.process_time() - start
    assert len(trace) == 1_000_000
    assert took < 1.5  # measured: 0.2


MISTAKES = {
    "": "must begin with its arrivals",
    "poisson": "must begin with its arrivals",
    "poison:rate=8,n=1,prompt=1,output=1": "did you mean 'poisson'",
    "poisson:n=1,prompt=1,output=1": "poisson arrivals need rate=NUMBER",
    "gamma:rate=8,n=1,prompt=1,output=1": "need cv=NUMBER, as in gamma:rate=8,cv=2",
    "poisson:rate=8,cv=2,n=1,prompt=1,output=1": "unknown option of poisson arrivals 'cv'",
    "poisson:rate=0,n=1,prompt=1,output=1": "rate must be above 0",
    "poisson:rate=1e10,n=1,prompt=1,output=1": "at most 1e9 (requests per second), not 1e+10",
    "poisson:rate=1,duration_s=1e15,prompt=1,output=1": "at most 4e9, not 1e+15",
    "gamma:rate=1,cv=0,n=1,prompt=1,output=1": "cv must be between",
    "poisson:rate=8,n=1,promt=1,output=1": "did you mean 'prompt'",
    "poisson:rate=8,n=1,output=1": "needs prompt=LENGTHS",
    "poisson:rate=8,n=1,prompt=1": "needs output=LENGTHS",
    "poisson:rate=8,prompt=1,output=1": "give either n=REQUESTS or duration_s=SECONDS",
    "poisson:rate=8,n=1,duration_s=1,prompt=1,output=1": "give either",
    "poisson:rate=8,duration=1,prompt=1,output=1": "did you mean 'duration_s'",
    "poisson:rate=8,n=0,prompt=1,output=1": "n must be 1 to",
    "poisson:rate=8,n=1.5,prompt=1,output=1": "n is 1.5, not a whole number",
    "poisson:rate=8,n=1e30,prompt=1,output=1": "n is 1e+30, too large",
    "poisson:rate=8,n=many,prompt=1,output=1": "n is 'many', not a number",
    "poisson:rate=1e9,duration_s=1e9,prompt=1,output=1": "requests, more than",
    "poisson:rate=1e-9,n=99,prompt=1,output=1": "more than the clock holds",
    "poisson:rate=1,duration_s=1e-9,prompt=1,output=1": "no request arrives",
    "poisson:rate=8,n=1,prompt=lognorml(1,2),output=1": "did you mean 'lognormal'",
    "poisson:rate=8,n=1,prompt=lognormal(5),output=1": "prompt: lognormal needs p90",
    "poisson:rate=8,n=1,prompt=lognormal(5,2),output=1": "needs 1 <= median <= P90",
    "poisson:rate=8,n=1,prompt=lognormal(1,2,mx=3),output=1": "did you mean 'max'",
    "poisson:rate=8,n=1,prompt=lognormal(1,2,3,4,5),output=1": "no more",
    "poisson:rate=8,n=1,prompt=lognormal(1,2,median=3),output=1": "has median twice",
    "poisson:rate=8,n=999,prompt=lognormal(1e5,1e9),output=1": "give it a max=",
    "poisson:rate=8,n=1,prompt=uniform(9,3),output=1": "the lower bound is the larger",
    "poisson:rate=8,n=1,prompt=0,output=1": "prompt: fixed: a length must be 1 to",
    "poisson:rate=8,n=1,prompt=1.5,output=1": "prompt is 1.5, not a whole number",
    "poisson:rate=8,n=1,lengths=empirical(/nothing)": "/nothing: cannot be read",
    "poisson:rate=8,n=1,lengths=empirical()": "needs a trace file",
    "poisson:rate=8,n=1,lengths=512": "unknown joint length distribution '512'",
    "poisson:rate=8,n=1,lengths=512,prompt=1": "give one or the other",
    "poisson:rate=8,n=1,prompt=1,output=1,system=512": "write system=4x512",
    "poisson:rate=8,n=1,prompt=1,output=1,system=0x512": "number of prompts must be",
    "poisson:rate=8,n=1,prompt=1,output=1,system=4x0": "a length must be",
    "poisson:rate=8,n=1,prompt=1,output=1,system=prompts(4)": "needs a number and a length",
    "poisson:rate=8,n=1,prompt=1,output=1,system=prompts(4,5,zip=1)": "did you mean 'zipf'",
    "poisson:rate=8,n=1,prompt=1,output=1,system=prompts(4,5,share=0)": "share must be",
    "poisson:rate=8,n=1,prompt=2e9,output=1,system=1x2e9": "a prompt would have",
    "poisson:rate=8,n=1,prompt=1,output=1,tenants=a": "write mix(NAME=SHARE,...)",
    "poisson:rate=8,n=1,prompt=1,output=1,tenants=mix(a=-1)": "shares must be 0 or more",
    "poisson:rate=8,n=1,prompt=1,output=1,priorities=mix(a=1)": "priorities is 'a'",
    "poisson:rate=8;n=1": "';n=1' is not understood",
    "poisson:rate=8,rate=9,n=1": "rate is given twice",
    "poisson:rate=8,n=1,prompt=(": "expected a value",
    "poisson:rate=8,n=1,prompt=uniform(1,2": "expected ')'",
    "poisson:rate=8,n=1,prompt=1)": "expected a comma",
    "poisson:rate=8,n=1,prompt": "must be KEY=VALUE",
    "poisson:rate=8,n=1,prompt=" + "a(" * 500: "too many parentheses",
    "poisson:rate=8,arrivals=gamma": "arrivals come first",
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text[:60])
def test_mistakes_are_told_in_one_line(text):
    assert MISTAKES[text] in wrong(text)


def test_mistakes_in_mappings():
    good = {"arrivals": "poisson", "rate": 1, "n": 5, "prompt": 1, "output": 1}
    assert len(traces.generate(good, 0)) == 5
    assert "needs arrivals" in wrong({**good, "arrivals": None} and {"rate": 1})
    assert "unknown arrival process 'None'" in wrong({**good, "arrivals": None})
    assert "prompt: None is not" in wrong({**good, "prompt": None})
    assert "not a number, a word or NAME" in wrong({**good, "prompt": [1, 2]})
    assert "prompt.p90: True is not" in wrong({**good, "prompt": {"lognormal": {"p90": True}}})
    assert "tenants: shares" in wrong({**good, "tenants": {}})
    with pytest.raises(UserError, match="seed must be 0 or more"):
        traces.generate(good, -1)


def test_any_text_gives_a_trace_or_a_user_error(monkeypatch):
    for module in (arrivals, workload):
        monkeypatch.setattr(module, "MAX_REQUESTS", 5000)
    rng = random.Random(5)
    good = f"{SPEC},system=prompts(4,uniform(9,99),zipf=1),tenants=mix(a=1,b=3),priorities=mix(0=1)"
    good = good.replace("20000", "30")
    pieces = [*"(),=:'-.x é\n\"", "9" * 25, "e5", "nan", ""]
    outcomes = {True: 0, False: 0}
    for _ in range(1500):
        text = good
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(text))
            cut = at + rng.choice([0, 0, 1, 5])
            text = text[:at] + rng.choice(pieces) + text[cut:]
        try:
            trace = traces.generate(text, 0)
        except UserError as error:
            message = str(error)
        else:
            message = ""
            assert trace.prompt_tokens.min() >= 1
        assert "\n" not in message
        assert len(message) < 1000
        outcomes[message == ""] += 1
    assert min(outcomes.values()) > 30


def test_lengths_and_processes_are_values():
    assert lengths.Fixed(5) == traces.Fixed(5)
    assert traces.parse_arrivals("gamma:rate=8,cv=2") == traces.Gamma(rate=8, cv=2)
