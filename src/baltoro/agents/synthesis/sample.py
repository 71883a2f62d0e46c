"""Sampling related concepts for a task.

    leaf          one concept that nothing is finer than
    siblings      two to four with a common parent
    root path     a chain of at least three from a seed down
    cross domain  two that share no seed

Deep and atomic concepts are preferred, often sampled ones avoided:
weight = exp(depth / 2) * (4 if atomic) / (1 + attempts).
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from baltoro.agents.synthesis.graph import Graph, Node

Strategy = Literal["leaf", "siblings", "root path", "cross domain"]
STRATEGY_WEIGHTS: dict[Strategy, float] = {
    "leaf": 3.0,
    "siblings": 3.0,
    "root path": 2.0,
    "cross domain": 3.0,
}
ATOMIC_FACTOR = 4.0
MIN_PATH = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Concepts to make a task of."""

    strategy: Strategy
    nodes: tuple[Node, ...]
    context: tuple[str, ...]  # names of coarser concepts, for queries


def weight(node: Node) -> float:
    """How much a node is wanted."""
    factor = ATOMIC_FACTOR if node.is_atomic else 1.0
    return math.exp(node.depth / 2) * factor / (1 + node.attempts)


def draw_sample(graph: Graph, drawn: random.Random) -> Sample | None:
    """A sample, counted as an attempt; equal for equal graphs and generators.

    A strategy that the graph has no nodes for gives way to another; None if no strategy has any.
    """
    left = dict(STRATEGY_WEIGHTS)
    while left:
        strategy = drawn.choices(list(left), list(left.values()))[0]
        del left[strategy]
        nodes = _nodes(graph, strategy, drawn)
        if nodes:
            graph.count_attempt([node.id for node in nodes])
            coarser = set().union(*(graph.ancestors(node.id) for node in nodes))
            coarser -= {node.id for node in nodes}
            context = tuple(graph.node(each).name for each in sorted(coarser))
            return Sample(strategy=strategy, nodes=nodes, context=context)
    return None


def _nodes(graph: Graph, strategy: Strategy, drawn: random.Random) -> tuple[Node, ...]:
    nodes = [node for node in graph.nodes() if graph.documents(node.id)]
    if strategy == "leaf":
        leaves = [node for node in nodes if not graph.children(node.id)]
        return _choice(leaves, drawn)
    if strategy == "siblings":
        return _siblings(graph, nodes, drawn)
    if strategy == "root path":
        return _root_path(graph, nodes, drawn)
    assert strategy == "cross domain", get_args(Strategy)
    first = _choice(nodes, drawn)
    if not first:
        return ()
    seeds = graph.roots(first[0].id)
    others = [node for node in nodes if not seeds & graph.roots(node.id)]
    second = _choice(others, drawn)
    return (*first, *second) if second else ()


def _siblings(graph: Graph, nodes: Sequence[Node], drawn: random.Random) -> tuple[Node, ...]:
    known = {node.id for node in nodes}
    families = []
    for parent in graph.nodes():
        family = [graph.node(each) for each in graph.children(parent.id) if each in known]
        if len(family) >= 2:
            families.append(family)
    if not families:
        return ()
    family = drawn.choice(families)
    chosen: list[Node] = []
    for _ in range(min(drawn.randint(2, 4), len(family))):
        (node,) = _choice([each for each in family if each not in chosen], drawn)
        chosen.append(node)
    return tuple(chosen)


def _root_path(graph: Graph, nodes: Sequence[Node], drawn: random.Random) -> tuple[Node, ...]:
    deep = [node for node in nodes if node.depth >= MIN_PATH - 1]
    chosen = _choice(deep, drawn)
    if not chosen:
        return ()
    path = [chosen[0]]
    while parents := graph.parents(path[0].id):
        nearest = min((graph.node(each) for each in parents), key=lambda each: each.depth)
        path.insert(0, nearest)
    return tuple(path)


def _choice(nodes: Sequence[Node], drawn: random.Random) -> tuple[Node, ...]:
    """One node by weight, as a tuple of one; empty if there are none."""
    if not nodes:
        return ()
    return (drawn.choices(nodes, [weight(node) for node in nodes])[0],)
