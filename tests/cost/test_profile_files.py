"""Profile files as users hand them over: edited, cut off, of another kind."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.cost.hardware import gpu
from sim.cost.profile import for_gpu, load, save, shipped_names
from sim.errors import UserError

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiles") / "good.json"
    save(for_gpu(gpu("A100-80G")), path)
    return path


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_profiles_pass_the_check(tmp_path: Path, name: str) -> None:
    file = tmp_path / "profile.json.gz"
    save(for_gpu(gpu(name)), file)
    assert load(file).gpu == name


def entry_of(data: dict[str, Any], op: str) -> dict[str, Any]:
    found: dict[str, Any] = next(e for e in data["entries"] if e["op"] == op)
    return found


def test_broken_entries_are_named(good: Path, tmp_path: Path) -> None:
    edits: list[tuple[str, Edit, str]] = [
        ("gemm", lambda e: e.update(op="gem"), "did you mean 'gemm'"),
        ("gemm", lambda e: e.update(points="x"), "points must be a number"),
        ("gemm", lambda e: e.update(points=-1), "points must be a number"),
        ("gemm", lambda e: e["ranges"].update(m=[5, 1]), "range of 'm' is empty"),
        ("gemm", lambda e: e["ranges"].update(m=3), "TypeError"),
        ("gemm", lambda e: e["fit"]["coefficients"].pop("power"), "no coefficient 'power'"),
        ("gemm", lambda e: e["fit"]["coefficients"].update(memory=0), "coefficient 'memory'"),
        ("gemm", lambda e: e["fit"]["coefficients"].update(power=float("nan")), "'power'"),
        ("gemm", lambda e: e["fit"].update(burst=0), "burst must be a number"),
        ("gemm", lambda e: e["fit"].pop("residual"), "KeyError: 'residual'"),
        ("gemm", lambda e: e["fit"]["residual"].update(weights="!"), "entry 1"),
        ("gemm", lambda e: e["fit"]["residual"]["axes"].pop(), "residual over"),
        ("prefill", lambda e: e["fit"].update(variant={}), "no variant"),
        ("collective", lambda e: e["key"].pop("world"), "no key 'world'"),
        ("decode", lambda e: e.update(key=3), "AttributeError"),
    ]
    for op, edit, message in edits:
        data = json.loads(good.read_text())
        data["entries"] = [entry_of(data, op)]
        edit(data["entries"][0])
        file = tmp_path / "edited.json"
        file.write_text(json.dumps(data))
        with pytest.raises(UserError, match=message) as caught:
            load(file)
        assert f"{file}: damaged profile: entry 1" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a profile"),
        (b"{}", "no 'schema' and 'gpu'"),
        (b'{"schema": 1, "gpu": "A100-80G"}', "damaged profile"),
        (b'{"schema": 1, "gpu": 3, "entries": []}', "'gpu' must be a text"),
        (b'{"schema": 99, "gpu": "x", "entries": []}', "profile schema 99"),
        (b"[" * 100_000, "not a profile"),
        (b"\xff\xfe", "not a profile"),
        (gzip.compress(b"{" * 1000, mtime=0)[:-9], "not a profile"),
        (b"\x1f\x8bjunk", "not a profile"),
        (gzip.compress(b"", mtime=0)[:10] + b"\xff" * 9, "not a profile"),
    ],
)
def test_files_that_are_no_profile(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "profile.json"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(file)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "none.json", "a\0b", "a" * 5000):
        with pytest.raises(UserError, match="cannot read the profile"):
            load(tmp_path / name)
