"""On published timings: what a coarse calibration of a GPU predicts of all other points."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibrate.cli import main
from calibrate.fit.holdout import coarse_test, unseen_test
from calibrate.fit.points import of_gpu, read_points
from calibrate.fit.profile import Group, groups
from sim.cost.hardware import gpu

pytestmark = pytest.mark.shared


def group_of(folder: Path, name: str, spelled: str, **key: str) -> Group:
    points = of_gpu(read_points(folder / "kernel_data" / f"{name}.csv.gz"), [spelled])
    found = [g for g in groups([points]) if key.items() <= g.key.items()]
    return max(found, key=len)


# Limits on (median, p90), per cent: what the accuracy page promises, with a little air for points
# that scatter more than H100's.
@pytest.mark.parametrize(
    ("name", "spelled", "key", "limit"),
    [
        ("attn_prefill", "H100-SXM", {"kv_dtype": "bf16", "engine": "vllm-0.24.0"}, (3.0, 12.0)),
        ("attn_prefill", "L40S", {"kv_dtype": "bf16"}, (3.0, 12.0)),
        ("attn_decode", "H100-SXM", {"kv_dtype": "bf16", "engine": "vllm-0.24.0"}, (4.0, 18.0)),
        ("attn_decode", "B200-SXM", {"kv_dtype": "bf16"}, (4.0, 18.0)),
        ("moe", "H100-SXM", {"dtype": "bf16", "distribution": "balanced"}, (3.0, 12.0)),
        ("moe", "RTXPRO6000-SE", {"dtype": "bf16", "distribution": "balanced"}, (3.0, 12.0)),
        ("allreduce", "H100-SXM", {"impl": "vllm_graph", "engine": "vllm-0.24.0"}, (4.0, 17.0)),
    ],
)
def test_coarse_points_predict_the_rest(
    shared_dir: Path, name: str, spelled: str, key: dict[str, str], limit: tuple[float, float]
) -> None:
    test = coarse_test(group_of(shared_dir, name, spelled, **key), gpu(spelled))
    assert test is not None
    assert test.error[0] <= limit[0]
    assert test.error[1] <= limit[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "seen", "unseen"), [("bf16", (4.0, 14.0), (4.0, 12.0)), ("fp8", (5.0, 17.0), None)]
)
def test_coarse_matrix_products_predict_the_rest(
    shared_dir: Path,
    dtype: str,
    seen: tuple[float, float],
    unseen: tuple[float, float] | None,
) -> None:
    group = group_of(shared_dir, "gemm", "H100-SXM", dtype=dtype, engine="vllm-0.24.0")
    test = coarse_test(group, gpu("h100"))
    assert test is not None
    assert np.all(np.array(test.error) <= seen)
    if unseen is not None:
        left_out = unseen_test(group, gpu("h100"))
        assert left_out is not None
        assert np.all(np.array(left_out.error) <= unseen)


def test_report_prints_errors_and_draws(
    shared_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = shared_dir / "kernel_data" / "attn_prefill.csv.gz"
    assert main(["report", str(points), "--gpu", "RTX4090", "--out", str(tmp_path)]) == 0
    assert "prefill, coarse" in capsys.readouterr().out
    assert (tmp_path / "measured_vs_predicted.svg").is_file()
