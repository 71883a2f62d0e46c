from pathlib import Path

import pytest

from baltoro.checkpoint.fixture import fixture
from baltoro.checkpoint.load import load
from baltoro.model.model import Model


@pytest.fixture(scope="session")
def nano_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano checkpoint of random weights, with a tokenizer and an image processor."""
    out = tmp_path_factory.mktemp("serve") / "nano"
    fixture(str(out), preset="nano")
    return out


@pytest.fixture(scope="session")
def nano(nano_dir: Path) -> Model:
    """Its model; shared, so a test must not change it."""
    return load(nano_dir)
