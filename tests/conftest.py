"""What every test may use: the shared data folder; and the rule that CI skips nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
# The only reasons for which a test may be skipped in CI: what it tries is not there without them.
ALLOWED_SKIPS = ("needs an NVIDIA GPU", "needs a C compiler")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of public traces, measurements and recorded schedules, beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip("needs the shared data folder beside the checkout")
    return SHARED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if SHARED.is_dir():
        return
    skip = pytest.mark.skip(reason="needs the shared data folder beside the checkout")
    for item in items:
        if item.get_closest_marker("shared"):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """In CI a skip is a failure, but for the lack of a GPU or of a C compiler."""
    report = yield
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        reason = str(call.excinfo.value) if call.excinfo else ""
        if not any(allowed in reason for allowed in ALLOWED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"skipped in CI: {reason}"
    return report
