"""A corpus of two texts and an empty graph over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from agents.texts import GLACIERS, RIVERS

from baltoro.agents.synthesis.corpus import Corpus
from baltoro.agents.synthesis.graph import Graph


@pytest.fixture
def corpus() -> Iterator[Corpus]:
    made = Corpus([("rivers.md", RIVERS), ("glaciers.md", GLACIERS)])
    yield made
    made.close()


@pytest.fixture
def graph(tmp_path: Path, corpus: Corpus) -> Iterator[Graph]:
    made = Graph(tmp_path / "graph.db", corpus.fingerprint)
    yield made
    made.close()
