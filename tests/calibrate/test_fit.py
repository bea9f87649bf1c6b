"""Fitting a profile from points and predicting points with it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from calibrate.cli import main
from calibrate.fit.points import check_points, read_points
from sim.cost.hardware import gpu
from sim.cost.operators import FORMS
from sim.cost.operators.base import Component
from sim.cost.predictor import Predictor
from sim.cost.profile import load
from sim.cost.residual import Residual, covariance_matrix
from sim.errors import UserError

GEMM = {"compute": 0.7, "memory": 0.85, "power": 2.0, "fixed": 3.0, "serial": 0.03}


def gemm_points(name: str = "H100-SXM", noise: float = 0.0) -> pd.DataFrame:
    """Points that the form itself describes."""
    card = gpu("h100")
    m, n, k = (
        a.ravel().astype(float)
        for a in np.meshgrid([1, 8, 64, 256, 1024, 4096], [1024, 4096, 8192], [1024, 4096, 8192])
    )
    form, key = FORMS["gemm"], {"dtype": "bf16"}
    work = form.work({"m": m, "n": n, "k": k}, card, key, {})
    us = form.us(GEMM, work, card, key, cold=False)
    us = us * np.exp(noise * np.random.default_rng(0).standard_normal(len(us)))
    return pd.DataFrame(
        {"gpu": name, "dtype": "bf16", "m": m.astype(int), "n": n.astype(int),
         "k": k.astype(int), "us": us, "engine": "e-1.0", "kernel": "x"}
    )  # fmt: skip


def test_fit_and_predict_round_trip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points, profile, out = tmp_path / "p.csv.gz", tmp_path / "h.json", tmp_path / "o.csv"
    table = gemm_points()
    table.to_csv(points, index=False)
    assert main(["fit", str(points), "--gpu", "h100", "--out", str(profile)]) == 0
    assert main(["predict", "--profile", str(profile), str(points), "--out", str(out)]) == 0
    predicted = pd.read_csv(out)
    assert list(predicted.columns) == [*table.columns, "predicted_us", "extrapolated"]
    assert not predicted.extrapolated.any()
    assert len(predicted) == len(table)
    assert (predicted.predicted_us / table.us - 1).abs().median() < 0.02
    assert "gemm bf16 e-1.0 x" in capsys.readouterr().err


def test_equal_points_give_an_equal_profile(tmp_path: Path) -> None:
    points = tmp_path / "p.csv"
    gemm_points(noise=0.05).to_csv(points, index=False)
    for name in ("a.json.gz", "b.json.gz"):
        assert main(["fit", str(points), "--gpu", "H100-SXM", "--out", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_points_to_predict_need_no_measurements(tmp_path: Path) -> None:
    table = gemm_points()
    table.to_csv(tmp_path / "p.csv", index=False)
    table.drop(columns="us").to_csv(tmp_path / "q.csv", index=False)
    table.assign(us="").to_csv(tmp_path / "r.csv", index=False)
    profile, out = tmp_path / "h.json", tmp_path / "o.csv"
    assert main(["fit", str(tmp_path / "p.csv"), "--gpu", "h100", "--out", str(profile)]) == 0
    for name in ("q.csv", "r.csv"):
        args = ["predict", "--profile", str(profile), str(tmp_path / name), "--out", str(out)]
        assert main(args) == 0
        assert pd.read_csv(out).predicted_us.gt(0).all()


def test_order_files_compression_and_further_columns_do_not_matter(tmp_path: Path) -> None:
    table = gemm_points(noise=0.05)
    table = pd.concat([table, gemm_points(noise=0.1).iloc[::5]])  # some points twice
    table.to_csv(tmp_path / "all.csv", index=False)
    shuffled = table.sample(frac=1.0, random_state=3).assign(remark="x", clock=1980)
    shuffled.iloc[:20].to_csv(tmp_path / "b.csv.gz", index=False)
    shuffled.iloc[20:].to_csv(tmp_path / "c.csv", index=False)
    found = []
    for files in (["all.csv"], ["c.csv", "b.csv.gz"]):
        out = tmp_path / "o.json"
        paths = [str(tmp_path / name) for name in files]
        options = ["--gpu", "h100", "--out", str(out), "--source", "test"]
        assert main(["fit", *paths, *options]) == 0
        found.append(out.read_bytes())
    assert found[0] == found[1]


def test_rows_unlike_the_fitted_ones_are_flagged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = gemm_points()
    table.to_csv(tmp_path / "p.csv", index=False)
    asked = table.iloc[:3].copy()
    asked.loc[asked.index[1], "m"] = 10_000
    asked.loc[asked.index[2], "engine"] = "e-2.0"
    asked.to_csv(tmp_path / "q.csv", index=False)
    profile, out = tmp_path / "h.json", tmp_path / "o.csv"
    assert main(["fit", str(tmp_path / "p.csv"), "--gpu", "h100", "--out", str(profile)]) == 0
    args = ["predict", "--profile", str(profile), str(tmp_path / "q.csv"), "--out", str(out)]
    assert main(args) == 0
    assert pd.read_csv(out).extrapolated.tolist() == [False, True, True]
    said = capsys.readouterr().err
    assert "1 of 3 rows are of an operator that was not fitted" in said
    assert "1 of 3 rows are beyond the sizes that were fitted" in said


def test_operator_without_points_is_flagged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, out = tmp_path / "h.json", tmp_path / "o.csv"
    gemm_points().to_csv(tmp_path / "p.csv", index=False)
    assert main(["fit", str(tmp_path / "p.csv"), "--gpu", "h100", "--out", str(profile)]) == 0
    (tmp_path / "q.csv").write_text("op,dtype,world,bytes,impl\nall_reduce,bf16,2,4096,nccl\n")
    args = ["predict", "--profile", str(profile), str(tmp_path / "q.csv"), "--out", str(out)]
    assert main(args) == 0
    assert pd.read_csv(out).extrapolated.tolist() == [True]
    assert "1 of 1 rows are of an operator that was not fitted" in capsys.readouterr().err


NOT_FITTED = {
    "mixed": "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n16,0,1,32,9.6\n",
    "skew": "n,kv_mean,t_mean_us,t_max_us,t_skew_us\n2,64,1.0,2.0,1.5\n",
    "deepep": "num_token,num_experts,dispatch_avg_t_us,combine_avg_t_us\n1,128,16.5,16.8\n",
    "alltoall": "op_name,num_tokens,moe_ep_size,us\nprepare,1,4,11.4\n",
    "activated": "tokens,activated_experts,time_us\n1,8,50.2\n",
    "deployments": "isl,osl,silicon_ttft_ms\n1024,128,50.0\n",
}


@pytest.mark.parametrize("name", NOT_FITTED)
def test_tables_that_are_not_fitted_are_refused_alone_and_skipped_among_others(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text(NOT_FITTED[name])
    gemm_points().to_csv(tmp_path / "p.csv", index=False)
    options = ["--gpu", "h100", "--out", str(tmp_path / "h.json")]
    assert main(["fit", str(tmp_path / "t.csv"), *options]) == 2
    said = capsys.readouterr().err
    assert "are not fitted; " in said
    assert said.count("\n") == 1
    assert main(["fit", str(tmp_path / "t.csv"), str(tmp_path / "p.csv"), *options]) == 0
    assert f"skipped: {tmp_path / 't.csv'}" in capsys.readouterr().err


def test_helpers_of_quantisation_are_elementwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"scale,{m},{k},fp8,{2 + m * k / 1e6}" for m in (1, 64, 4096) for k in (128, 8192)]
    text = "\n".join(["op,m,k,quant,us", *rows, "scale,2,2,fp8,0.0"])
    (tmp_path / "q.csv").write_text(text)
    profile, out = tmp_path / "h.json", tmp_path / "o.csv"
    assert main(["fit", str(tmp_path / "q.csv"), "--gpu", "h100", "--out", str(profile)]) == 0
    assert "1 rows of 0 us left out" in capsys.readouterr().err
    args = ["predict", "--profile", str(profile), str(tmp_path / "q.csv"), "--out", str(out)]
    assert main(args) == 0
    found = pd.read_csv(out).iloc[:-1]
    assert list(found.columns[:4]) == ["op", "m", "k", "quant"]
    assert (found.predicted_us / found.us - 1).abs().max() < 0.1


def test_unknown_gpu_needs_a_datasheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points, sheet, profile = tmp_path / "p.csv", tmp_path / "s.json", tmp_path / "x.json"
    gemm_points("X1").to_csv(points, index=False)
    args = ["fit", str(points), "--gpu", "X1", "--out", str(profile)]
    assert main(args) == 2
    assert "unknown GPU 'X1'" in capsys.readouterr().err
    peaks = {"bf16": 989, "memory_gib": 80, "bandwidth": 3350, "sms": 132}
    sheet.write_text(json.dumps(peaks))
    assert main([*args, "--datasheet", str(sheet)]) == 0
    out = tmp_path / "o.csv"
    assert main(["predict", "--profile", str(profile), str(points), "--out", str(out)]) == 0


def test_profile_of_another_gpu_is_refused(tmp_path: Path) -> None:
    points, profile = tmp_path / "p.csv", tmp_path / "h.json"
    gemm_points().to_csv(points, index=False)
    assert main(["fit", str(points), "--gpu", "h100", "--out", str(profile)]) == 0
    with pytest.raises(UserError, match="for H100-SXM, not for A100-80G"):
        Predictor(load(profile), gpu("a100"))


@pytest.mark.parametrize(
    ("columns", "op"),
    [
        ("gpu,dtype,m,n,k,us", "gemm"),
        ("batch,q_len,prefix,heads,kv_heads,head_dim,kv_dtype,us", "prefill"),
        ("batch,kv_len,heads,kv_heads,head_dim,kv_dtype,us", "decode"),
        ("tokens,hidden,inter,topk,experts,tp,ep,distribution,us", "moe"),
        ("op,dtype,world,bytes,us,impl", "collective"),
        ("op,tokens,dim,us,model,tp", "elementwise"),
    ],
)
def test_operator_is_recognised_by_its_columns(columns: str, op: str) -> None:
    table = pd.DataFrame([[1] * len(columns.split(","))], columns=columns.split(","))
    assert check_points(table, "x.csv").op == op


def test_mistakes_in_points_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"a.csv: its columns belong to no known operator"):
        read_points(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("m,n,k,us\n1,2,3,4\n1,2,3,-4\n")
    with pytest.raises(UserError, match=r"b.csv: row 3: us is -4"):
        read_points(tmp_path / "b.csv")
    for row, fault in (
        ("1,,3,4", "n is missing"),
        ("1,inf,3,4", "n is inf"),
        ("0,2,3,4", "m is 0"),
    ):
        (tmp_path / "b.csv").write_text(f"m,n,k,us\n{row}\n")
        with pytest.raises(UserError, match=f"b.csv: row 2: {fault}, not a positive number"):
            read_points(tmp_path / "b.csv")
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(b"m,n,k,us\n1,2,3,4\n")[:-6])
    with pytest.raises(UserError, match=r"c.csv.gz"):
        read_points(tmp_path / "c.csv.gz")
    with pytest.raises(UserError, match="cannot read"):
        read_points(tmp_path / "none.csv")


def test_folded_residual_equals_the_full_sum() -> None:
    rng = np.random.default_rng(3)
    positions = rng.integers(0, 6, (80, 3)).astype(float)
    parts = (Component(0.5, (2.0, 1.0, 3.0), smooth=True), Component(0.2, (1.0, None, 2.0)))
    residual = Residual(positions, rng.standard_normal(80), parts)
    queries = np.stack([rng.uniform(0, 6, 50), np.full(50, 2.5), rng.uniform(0, 6, 50)], axis=1)
    full = covariance_matrix(queries, positions, parts) @ residual.weights
    assert residual(list(queries.T)) == pytest.approx(full, abs=1e-12)
    again = Residual.from_json(json.loads(json.dumps(residual.to_json())))
    assert again(list(queries.T)) == pytest.approx(full, abs=1e-5)


def test_outliers_do_not_bend_the_fit_of_matrix_products(tmp_path: Path) -> None:
    """One call in ten measured at half speed again, as in published fp8 timings of B200."""
    table = gemm_points()
    slow = np.random.default_rng(1).random(len(table)) < 0.1
    assert slow.sum() >= 3
    table.loc[slow, "us"] *= 1.6
    table.to_csv(tmp_path / "p.csv", index=False)
    profile, out = tmp_path / "h.json", tmp_path / "o.csv"
    assert main(["fit", str(tmp_path / "p.csv"), "--gpu", "h100", "--out", str(profile)]) == 0
    args = ["predict", "--profile", str(profile), str(tmp_path / "p.csv"), "--out", str(out)]
    assert main(args) == 0
    off = (pd.read_csv(out).predicted_us / gemm_points().us - 1).abs()
    assert off.median() < 0.01
    assert off[~slow].max() < 0.05


def test_residuals_over_earlier_axes_are_still_understood() -> None:
    """Profiles fitted before matrix products had nine axes mean what they meant."""
    form, card = FORMS["gemm"], gpu("h100")
    sizes = {"m": np.array([1.0, 100.0]), "n": np.array(4096.0), "k": np.array(4096.0)}
    work = form.work(sizes, card, {"dtype": "bf16"}, {})
    axes = form.axes(work)
    assert form.earlier_axes == 5
    assert len(axes) == len(form.covariance[0].lengths) == 9
    parts = (Component(0.5, (2.0, 1.0, 3.0, 1.0, 0.5)),)
    residual = Residual(np.zeros((1, 5)), np.ones(1), parts)
    assert residual(axes).tolist() == residual(axes[:5]).tolist()
    assert form.us(GEMM, work, card, {"dtype": "bf16"}, cold=False).tolist() == pytest.approx(
        form.us({**GEMM, "padding": 0.0}, work, card, {"dtype": "bf16"}, cold=False).tolist()
    )


def test_result_without_a_place_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gemm_points().to_csv(tmp_path / "p.csv", index=False)
    args = ["fit", str(tmp_path / "p.csv"), "--gpu", "h100"]
    for out in (tmp_path / "none" / "h.json", tmp_path):
        assert main([*args, "--out", str(out)]) == 2
        assert f"{out}: cannot be written" in capsys.readouterr().err


def test_report_with_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gemm_points(noise=0.03).to_csv(tmp_path / "p.csv", index=False)
    assert main(["report", str(tmp_path / "p.csv"), "--gpu", "h100", "--floor"]) == 0
    said = capsys.readouterr().out
    assert "gemm, coarse" in said
    assert "floor" in said.splitlines()[0]
