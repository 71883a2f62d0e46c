"""What every test shares: one thread, fixed seeds, reproducible property tests."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from sizes import beyond_aims

SOURCES = Path(__file__).parents[1] / "src"

# One thread: the tensors are small, and sums do not depend on how many cores the machine has.
torch.set_num_threads(1)
settings.register_profile("reproducible", derandomize=True, deadline=None)
settings.load_profile("reproducible")


def pytest_report_header() -> list[str]:
    return [f"longer than we aim for: {item}" for item in beyond_aims(SOURCES)]


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.fail("marked gpu, and this machine has no CUDA device; run it with `make gpu-test`")
