"""Every kernel compiles for A100, L40S and H100/H200 without a GPU, and stays within the chip's
limits.

`aot.py` compiles in a process of its own, because here kernels are decorated for the interpreter.
Its results are kept in ~/.cache/tokentwin (or $TOKENTWIN_CACHE), so only changed kernels are
compiled again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from aot_variants import PAIRS

HERE = Path(__file__).parent
# Bytes of shared memory a program can have (CUDA programming guide, compute capabilities).
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
REGISTERS_PER_BLOCK = 65536
SPILL_LIMIT = 32  # bytes of local memory a thread


@pytest.fixture(scope="module")
def compiler():
    """`compiler(variant, arch)` -> the result of each kernel, from one process for all tests."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), env.get("PYTHONPATH", "")])
    pipe = subprocess.PIPE
    command = [sys.executable, str(HERE / "aot.py")]
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True) as process:

        def compiled(variant, arch):
            process.stdin.write(f"{variant} {arch}\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, f"aot.py ended with {process.wait()}; its output is above"
            return json.loads(line)

        yield compiled
        process.stdin.close()


@pytest.mark.parametrize(
    ("variant", "arch"), PAIRS, ids=[f"{variant}-sm{arch}" for variant, arch in PAIRS]
)
def test_kernel_compiles_within_the_limits_of_the_chip(variant, arch, compiler):
    results = compiler(variant, arch)
    assert results, f"{variant} launched nothing"
    for result in results:
        assert "error" not in result, result["error"]
        assert result["shared"] <= SHARED_LIMIT[arch], result
    unknown = [result["unknown"] for result in results if "unknown" in result]
    if unknown:
        pytest.skip(f"compiled, shared memory fits; registers and spills NOT checked: {unknown[0]}")
    for result in results:
        assert result["registers"] * 32 * result["warps"] <= REGISTERS_PER_BLOCK, result
        assert result["local_bytes"] <= SPILL_LIMIT, result


@pytest.mark.parametrize("variant", ["prefill-D128-G4-bf16", "moe-T4096-E8-k2-bf16"])
def test_matrix_kernels_use_the_tensor_cores_of_hopper(variant, compiler):
    kernels = {result["kernel"]: result["wgmma"] for result in compiler(variant, 90)}
    matrix = kernels.keys() & {"_prefill_kernel", "_gate_up_kernel", "_down_kernel"}
    assert matrix
    assert all(kernels[name] for name in matrix), kernels
