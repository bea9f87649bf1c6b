"""Compile what the wrappers would launch on a chip that is not there, and say what it takes of the
chip.

    python aot.py WORD...   variants with one of these in their name (sm90, decode), a line each
    python aot.py           lines "VARIANT ARCH" on standard input, a JSON list each

TRITON_INTERPRET must not be set.

The wrappers run on meta tensors; `runtime.launch` is replaced by one that compiles instead of
launching, with the same specialisation as a launch on 16-byte aligned tensors. Results are cached
by the hash of everything that goes into a compilation, in $TOKENTWIN_CACHE or ~/.cache/tokentwin.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from aot_variants import PAIRS, VARIANTS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import runtime

NUM_SMS = {80: 108, 89: 142, 90: 132}
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip


def source_of(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> ASTSource:
    """The compilation that a launch with these arguments would make."""
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    names = kernel.arg_names
    given = dict(zip(names, args, strict=False)) | constants
    if set(given) != set(names):
        raise TypeError(f"{kernel.__name__}: arguments off by {set(given) ^ set(names)}")
    constant_params = {p.name for p in kernel.params if p.is_constexpr}
    plain_params = {p.name for p in kernel.params if p.do_not_specialize}
    for i, name in enumerate(names):
        value = given[name]
        is_int = isinstance(value, int) and not isinstance(value, bool)
        special = is_int and name not in plain_params  # as a launch specialises integers
        if name in constant_params or value is None or (special and value == 1):
            signature[name], constexprs[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif is_int:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if special and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return ASTSource(kernel, signature, constexprs, attributes)


def resources(cubin: bytes, folder: Path) -> dict[str, Any]:
    """Registers and bytes of local memory (spills) a thread, from the compiled kernel; or why they
    are not known."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    try:
        text = subprocess.run(
            [tool, "-res-usage", path], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return {"unknown": f"{tool} did not read the compiled kernel: {error}"}
    found = RESOURCES.search(text)
    if found is None:
        return {"unknown": f"{tool} printed no resource usage"}
    registers, stack, _, local = map(int, found.groups())
    return {"registers": registers, "local_bytes": stack + local}


def compile_launch(
    arch: int, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Compile one launch, or find it in the cache."""
    num_warps, num_stages = options.pop("num_warps", 4), options.pop("num_stages", 1)
    source = source_of(kernel, args, options)
    key = f"{source.hash()}-{arch}-{num_warps}-{num_stages}-{triton.__version__}-1"
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    cache = (
        Path(os.environ.get("TOKENTWIN_CACHE") or Path.home() / ".cache" / "tokentwin")
        / "kernels-aot"
    )
    entry = cache / f"{digest}.json"
    if entry.exists():
        return json.loads(entry.read_text()) | {"cached": True}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        with triton.knobs.cache.scope():
            triton.knobs.cache.dir = folder
            compiled = triton.compile(
                source, target=GPUTarget("cuda", arch, 32),
                options={"num_warps": num_warps, "num_stages": num_stages},
            )  # fmt: skip
        result = {
            "kernel": kernel.__name__, "arch": arch, "warps": num_warps, "stages": num_stages,
            "shared": compiled.metadata.shared, "wgmma": "wgmma" in compiled.asm["ptx"],
            **resources(compiled.asm["cubin"], Path(folder)),
            "seconds": round(time.perf_counter() - begin, 2),
        }  # fmt: skip
        dump = os.environ.get("TOKENTWIN_AOT_DUMP")
        if dump:
            for stage in ("ttgir", "ptx"):
                Path(dump, f"{kernel.__name__}-{arch}-{digest[:6]}.{stage}").write_text(
                    compiled.asm[stage]
                )
    cache.mkdir(parents=True, exist_ok=True)
    # Written aside and moved, so that two test runs at once never read half a file.
    aside = entry.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(result))
    aside.replace(entry)
    return result


def compile_variant(call: Callable[[], Any], arch: int) -> Iterator[dict[str, Any]]:
    """Every kernel that `call` launches on a chip of this `arch`; a failure is one more result."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    plain_launch, plain_chip = runtime.launch, runtime.chip
    runtime.chip = lambda device: runtime.Chip(arch, NUM_SMS[arch])
    runtime.launch = lambda kernel, grid, *args, **options: launches.append((kernel, args, options))
    try:
        call()
    finally:
        runtime.launch, runtime.chip = plain_launch, plain_chip
    for kernel, args, options in launches:
        try:
            yield compile_launch(arch, kernel, args, options)
        except Exception as error:
            yield {
                "kernel": kernel.__name__,
                "arch": arch,
                "error": f"{type(error).__name__}: {error}"[-2000:],
            }


def main() -> None:
    """Compile what is named on the command line, or what is asked for on standard input."""
    if len(sys.argv) == 1:
        for line in sys.stdin:
            name, arch = line.split()
            print(json.dumps(list(compile_variant(VARIANTS[name], int(arch)))), flush=True)
    for name, arch in PAIRS:
        if any(word in f"{name}-sm{arch}" for word in sys.argv[1:]):
            for result in compile_variant(VARIANTS[name], arch):
                print(json.dumps({"variant": name} | result), flush=True)


if __name__ == "__main__":
    main()
