"""Every kernel compiles for A100, L40S and H100/H200 without a GPU, and stays within the chip's
limits.

`aot.py` compiles in a process of its own, because here kernels are decorated for the interpreter.
Its results are kept in ~/.cache/tokentwin (or $TOKENTWIN_CACHE), so only changed kernels are
compiled again.
"""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from aot_variants import VARIANTS

HERE = Path(__file__).parent
SHARED_LIMIT = {
    80: 163 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
}  # bytes a program can have, CUDA programming guide
REGISTERS_PER_BLOCK = 65536
SPILL_LIMIT = 32  # bytes of local memory a thread


@pytest.fixture(scope="module")
def compiled():
    """{(variant, arch): [result of each kernel]} from one run of aot.py."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), env.get("PYTHONPATH", "")])
    # One at a time on this machine: parallel test workers wait and then find the results.
    with open(Path(tempfile.gettempdir()) / f"tokentwin-aot-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = subprocess.run(
            [sys.executable, str(HERE / "aot.py")], env=env, capture_output=True, text=True
        )
    assert run.returncode == 0, run.stderr[-3000:]
    results = defaultdict(list)
    for line in run.stdout.splitlines():
        result = json.loads(line)
        results[result["variant"], result["arch"]].append(result)
    return results


@pytest.mark.parametrize("arch", sorted(SHARED_LIMIT), ids=lambda arch: f"sm{arch}")
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernel_compiles_within_the_limits_of_the_chip(variant, arch, compiled):
    results = compiled[variant, arch]
    assert results, f"{variant} launched nothing"
    for result in results:
        assert "error" not in result, result["error"]
        assert result["shared"] <= SHARED_LIMIT[arch], result
    unknown = [result["unknown"] for result in results if "unknown" in result]
    if unknown:
        pytest.skip(
            f"compiled, shared memory within limits; registers and spills NOT checked: {unknown[0]}"
        )
    for result in results:
        assert result["registers"] * 32 * result["warps"] <= REGISTERS_PER_BLOCK, result
        assert result["local_bytes"] <= SPILL_LIMIT, result


def test_matrix_kernels_use_the_tensor_cores_of_hopper(compiled):
    large = [name for name in VARIANTS if name.startswith("prefill") and "fp32" not in name]
    assert large
    for name in large:
        assert all(result["wgmma"] for result in compiled[name, 90]), name
