"""Every example of the package's page runs and prints what it says."""

from __future__ import annotations

import doctest


def test_readme_examples(repo_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = str(repo_root / "traces" / "README.md")
    results = doctest.testfile(page, module_relative=False)
    assert results.attempted > 15
    assert results.failed == 0
