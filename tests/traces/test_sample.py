"""The bundled sample: reproducible, and statistically like the trace it is modelled on."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

import traces


def test_sample_is_an_azure_trace_of_two_thousand_requests():
    trace = traces.load(traces.sample_path())
    assert trace.format == "azure"
    assert len(trace) == 2000
    assert trace.counts == {"rows_read": 2000, "rows_reordered": 0, "rows_skipped": 0}
    assert "synthetic" in trace.name
    assert traces.sample_path().read_text().split("\n")[1].startswith("2030-")


def test_script_writes_the_sample_byte_for_byte(tmp_path):
    script = traces.sample_path().with_name("make_sample.py")
    out = tmp_path / "out.csv"
    subprocess.run([sys.executable, script, out], check=True)
    assert out.read_bytes() == traces.sample_path().read_bytes()


@pytest.mark.shared
def test_sample_resembles_the_public_trace(shared_dir):
    public = traces.load(shared_dir / "traces" / "AzureLLMInferenceTrace_conv.csv")
    sample = traces.load(traces.sample_path())
    for name in ("prompt_tokens", "output_tokens"):
        theirs, ours = getattr(public, name), getattr(sample, name)
        for q in (0.5, 0.9, 0.99):
            assert np.quantile(ours, q) == pytest.approx(np.quantile(theirs, q), rel=0.03), (
                name,
                q,
            )
        assert ours.mean() == pytest.approx(theirs.mean(), rel=0.02)
        assert stats.ks_2samp(ours, theirs).statistic < 0.03

    def correlations(trace):
        pair = trace.prompt_tokens, trace.output_tokens
        return stats.spearmanr(*pair).statistic, np.corrcoef(*pair)[0, 1]

    assert correlations(sample) == pytest.approx(correlations(public), abs=0.03)

    def rate(trace):
        return (len(trace) - 1) / (trace.arrival_ns[-1] / 1e9)

    def burstiness(trace):
        """CV of the gaps, and variance over mean of the counts in 10 s."""
        gaps = np.diff(trace.arrival_ns)
        counts = np.bincount(trace.arrival_ns // 10**10)[:-1]
        return gaps.std() / gaps.mean(), counts.var() / counts.mean()

    assert rate(sample) == pytest.approx(rate(public), rel=0.01)
    # the public trace drifts over its hour: compare with pieces as long as the sample
    pieces = [traces.window(public, start, start + 361.5) for start in range(0, 3100, 60)]
    theirs = np.array([burstiness(piece) for piece in pieces])
    ours = burstiness(sample)
    for i in range(2):
        assert theirs[:, i].min() <= ours[i] <= theirs[:, i].max()
    # and with the whole, where the drift adds to the gaps
    assert ours[0] == pytest.approx(burstiness(public)[0], rel=0.1)


@pytest.mark.shared
def test_sample_copies_no_row(shared_dir):
    public = (shared_dir / "traces" / "AzureLLMInferenceTrace_conv.csv").read_text().splitlines()
    assert not {line.strip() for line in public[1:]} & set(
        traces.sample_path().read_text().splitlines()[1:]
    )
