"""Shared by the tests of synthesis: two texts, a corpus and a graph over them."""

import asyncio

from baltoro.agents.synthesis.corpus import Corpus, Document
from baltoro.agents.synthesis.expand import (
    GrowthConfig,
    HeadingExpander,
    grow,
)
from baltoro.agents.synthesis.graph import Graph
from baltoro.sandbox.protocol import Limits

RIVERS = """# Rivers
Water that runs.

## Baltoro streams
The streams below the glacier join the Braldu river at the village of Askole in spring.

### Gauges
A gauge near the bridge measured 41 cubic metres in the July of a dry year.

## Lakes
Lakes are still.
"""
GLACIERS = """# Glaciers
Ice that flows.

## Baltoro streams
The glacier is 63 kilometres long and lies in the Karakoram range of high Asia.

## Snow
Snow turns to ice.
"""
LIMITS = Limits(memory_bytes=2 << 30)


def document(corpus: Corpus, name: str) -> Document:
    return next(each for each in corpus.documents.values() if each.name == name)


def grown(graph: Graph, corpus: Corpus) -> Graph:
    for seed in ("Rivers", "Glaciers"):
        graph.add_seed(seed)
    asyncio.run(grow(graph, corpus, HeadingExpander(), GrowthConfig()))
    return graph
