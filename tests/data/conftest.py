"""A small data folder that the tests of this room share."""

from pathlib import Path

import pytest
from data.small import small_config, write_sources

from baltoro.data.build import build
from baltoro.data.dataset import Dataset


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished data folder; not to be changed."""
    root = tmp_path_factory.mktemp("data")
    write_sources(root / "sources")
    build(small_config(root / "sources"), root / "built", report=lambda line: None)
    return root / "built"


@pytest.fixture
def dataset(built: Path) -> Dataset:
    return Dataset(built, "train", vocab_size=300)
