"""One thread, because the tests share the machine; without a GPU the kernels are interpreted."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is decorated, so it must be set before the first import of one.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
