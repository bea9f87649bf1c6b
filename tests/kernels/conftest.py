"""Where the kernels run in these tests: on the GPU if there is one, else in Triton's interpreter,
on the CPU.

The same test functions serve both. With a GPU every test that takes `device` carries the `gpu`
mark.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

MISSING = [name for name in ("torch", "triton") if find_spec(name) is None]

if MISSING:
    HAS_GPU = False
else:
    import torch

    HAS_GPU = torch.cuda.is_available()
    if not HAS_GPU:
        torch.set_num_threads(1)
        # Triton reads it when a kernel is decorated, so it must be set before the first import of a
        # kernel.
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device():
    """The device kernels run on here."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture
def rng(device):
    """A seeded generator on the kernels' device."""
    return torch.Generator(device).manual_seed(1234)


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if HAS_GPU and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)
        elif not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
