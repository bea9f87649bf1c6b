"""Real servers: fitted on the first 70 % of their recorded requests, better on the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calibrate.cli import main

pytestmark = pytest.mark.shared

IN_PROCESS = (
    "arrival_ms=queued_ms,prompt=input_tokens,output=output_tokens,"
    "first_token_ms=first_token_ms,last_token_ms=last_token_ms"
)
HTTP = (
    "arrival_us=arrival_us,prompt=input_tokens,ttft_ms=ttft_ms,e2e_ms=e2e_ms,"
    "prompt_id=prompt_id,ok=ok"
)
RTX_4090 = {
    "cost.engine_version": "0.19.0", "cost.frontend": "in-process", "engine.max_num_seqs": 256,
    "engine.max_num_batched_tokens": 2048, "engine.max_model_len": 32768,
    "engine.num_gpu_blocks": 2588,
}  # fmt: skip
RTX_PRO_6000 = {
    "cost.engine_version": "0.19.0", "cost.frontend": "in-process", "engine.max_num_seqs": 128,
    "engine.max_num_batched_tokens": 2048,
}  # fmt: skip
H100 = {
    "cost.engine_version": "0.15.1", "engine.max_num_seqs": 128, "engine.max_model_len": 4096,
    "engine.max_num_batched_tokens": 2048, "engine.num_gpu_blocks": 7462,
}  # fmt: skip


@pytest.mark.parametrize(
    ("recording", "columns", "server", "settings", "better"),
    [
        (
            "lss-rtx4090-llama3.1-8b-seqs256", IN_PROCESS,
            ("--model", "Llama-3.1-8B", "--gpu", "rtx4090"), RTX_4090, ("TTFT", "E2E"),
        ),
        (
            "lss-rtxpro6000-llama3.1-8b", IN_PROCESS,
            ("--model", "Llama-3.1-8B", "--gpu", "RTX PRO 6000"), RTX_PRO_6000, ("TTFT", "E2E"),
        ),
        pytest.param(
            "is-llama-2-7b-tp1-codegen", HTTP,
            ("--model", "Llama-2-7B", "--gpu", "h100", "--output-tokens", "247"), H100,
            ("TPOT", "E2E"),
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_real_server_is_predicted_better_after_the_fit(
    recording: str,
    columns: str,
    server: tuple[str, ...],
    settings: dict[str, object],
    better: tuple[str, ...],
    shared_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = shared_dir / "ground_truth" / "requests" / f"{recording}.csv.gz"
    sets = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = ["from-logs", str(log), "--columns", columns, *server, *sets, "--json"]
    assert main([*command, "--out", str(tmp_path / "p.json")]) == 0
    errors = json.loads(capsys.readouterr().out)["errors"]
    for latency in better:
        before, after = (errors[when][latency]["held_out"] for when in ("before", "after"))
        # Half of the error of the mean at the most, and of the single requests it is smaller.
        assert abs(after["bias"]) < abs(before["bias"]) / 2, latency
        assert after["median"] < before["median"], latency
        assert after["p90"] < before["p90"], latency
