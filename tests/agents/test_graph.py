"""Concepts from texts: the corpus, the graph, how it grows, what is sampled from it."""

import asyncio
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from agents.texts import document, grown

from baltoro.agents.failure import PolicyError
from baltoro.agents.policy import Line, Prompt, ScriptedPolicy
from baltoro.agents.synthesis.corpus import Corpus, Document
from baltoro.agents.synthesis.expand import (
    GrowthConfig,
    HeadingExpander,
    PolicyExpander,
    Proposal,
    criterion,
    grow,
    headings,
)
from baltoro.agents.synthesis.graph import Child, Graph, Node
from baltoro.agents.synthesis.sample import Sample, draw_sample, weight

# --- corpus


def test_documents_are_found_by_their_words_and_quotes_checked(corpus):
    first, *_ = corpus.search("Karakoram ice")
    assert first.name == "glaciers.md"
    assert corpus.search("?!") == []
    rivers = document(corpus, "rivers.md").id
    assert corpus.holds(rivers, "join the  Braldu\nriver")
    assert not corpus.holds(rivers, "join the Indus river")
    assert not corpus.holds("0" * 64, "Water")


def test_a_corpus_is_known_by_its_contents(tmp_path):
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/b.txt").write_text("two")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    read = Corpus.of_folder(tmp_path)
    given = Corpus([("x.md", "two"), ("y.md", "one"), ("z.md", "one")])
    assert read.fingerprint == given.fingerprint
    assert {each.name for each in read.documents.values()} == {"a.md", "sub/b.txt"}
    read.close()
    given.close()


def test_a_corpus_that_cannot_be_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no document"):
        Corpus.of_folder(tmp_path)
    with pytest.raises(ValueError, match=r"two texts are named 'a'"):
        Corpus([("a", "1"), ("a", "2")])
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8"):
        Corpus.of_folder(tmp_path)


# --- graph


def child(name: str, same_as: int | None = None) -> Child:
    return Child(name=name, summary="", documents=("d",), same_as=same_as)


def test_a_graph_closes_no_cycle(graph):
    top = graph.add_seed("top")
    (middle,) = graph.expand(top, [child("middle")], max_depth=8)
    (low,) = graph.expand(middle, [child("low")], max_depth=8)
    assert graph.expand(low, [child("x", same_as=top), child("y", same_as=low)], max_depth=8) == []
    assert graph.node(low).is_atomic
    assert graph.ancestors(low) == {top, middle}
    assert graph.descendants(top) == {middle, low}


def test_a_concept_found_twice_is_one_node_with_two_parents(graph):
    one, two = graph.add_seed("one"), graph.add_seed("two")
    (shared,) = graph.expand(one, [child("shared")], max_depth=8)
    assert graph.expand(two, [child("again", same_as=shared)], max_depth=8) == [shared]
    assert graph.parents(shared) == [one, two]
    assert graph.roots(shared) == {one, two}
    assert len(graph.nodes()) == 3


def test_the_frontier_is_the_shallowest_open_node(graph):
    one, two = graph.add_seed("one"), graph.add_seed("two")
    graph.expand(one, [child("low")], max_depth=8)
    assert graph.frontier() == graph.node(two)
    graph.expand(two, [], max_depth=8)
    assert graph.frontier() is not None
    assert graph.frontier().name == "low"


def test_nothing_grows_below_the_deepest_level(graph):
    top = graph.add_seed("top")
    (low,) = graph.expand(top, [child("low")], max_depth=1)
    assert graph.expand(low, [child("lower")], max_depth=1) == []
    assert graph.node(low).is_atomic


def test_a_graph_over_another_corpus_is_refused(tmp_path):
    Graph(tmp_path / "g.db", "a").close()
    with pytest.raises(ValueError, match="made with corpus='a', not 'b'"):
        Graph(tmp_path / "g.db", "b")


# --- growth


def test_headings_become_a_graph_and_namesakes_meet(graph, corpus):
    grown(graph, corpus)
    names = {node.name for node in graph.nodes()}
    assert names == {"Rivers", "Glaciers", "Baltoro streams", "Lakes", "Gauges", "Snow"}
    (shared,) = (node for node in graph.nodes() if node.name == "Baltoro streams")
    assert {graph.node(each).name for each in graph.parents(shared.id)} == {"Rivers", "Glaciers"}
    assert len(graph.documents(shared.id)) == 2
    assert graph.frontier() is None


def test_growth_that_died_goes_on_and_ends_the_same(tmp_path, corpus):
    class Dying(HeadingExpander):
        left = 2

        async def children(
            self, node: Node, coarser: Sequence[str], documents: Sequence[Document]
        ) -> list[Proposal]:
            if self.left == 0:
                raise PolicyError("gone")
            self.left -= 1
            return await super().children(node, coarser, documents)

    def shape(graph: Graph) -> list[tuple[str, int, bool, list[int]]]:
        return [(n.name, n.depth, n.is_atomic, graph.parents(n.id)) for n in graph.nodes()]

    whole = Graph(tmp_path / "whole.db", corpus.fingerprint)
    expected = shape(grown(whole, corpus))
    whole.close()
    for _ in range(10):
        graph = Graph(tmp_path / "torn.db", corpus.fingerprint)
        for seed in ("Rivers", "Glaciers"):
            graph.add_seed(seed)
        try:
            asyncio.run(grow(graph, corpus, Dying(), GrowthConfig()))
            break
        except PolicyError:
            graph.close()
    assert shape(graph) == expected
    graph.close()


def test_a_budget_bounds_one_run(graph, corpus):
    graph.add_seed("Rivers")
    config = GrowthConfig(max_expansions=1)
    assert asyncio.run(grow(graph, corpus, HeadingExpander(), config)) == 1
    assert graph.frontier() is not None


def test_a_concept_without_documents_has_no_children(graph, corpus):
    node = graph.add_seed("Xylophones")
    asyncio.run(grow(graph, corpus, HeadingExpander(), GrowthConfig()))
    assert graph.node(node).is_atomic


def test_headings_are_read_with_their_level_and_text():
    assert list(headings("# A #\nx\ny\n### B\n")) == [(1, "A", "x y"), (3, "B", "")]


def test_a_policy_expands_and_recognises(graph, corpus):
    asked: list[str] = []

    def script(prompt: Prompt) -> Line:
        question = prompt.messages[0]["content"]
        asked.append(question)
        if "same concept" in question:
            return Line(content='{"same": true}')
        if "Concept: Rivers" in question:
            found = [
                {"name": "Braldu", "summary": "a river", "document": 0},
                {"name": "Nowhere", "summary": "not shown", "document": 9},
            ]
            return Line(content=f"Here they are: {json.dumps(found)}")
        if "Concept: Glaciers" in question:
            return Line(content='[{"name": "The Braldu", "summary": "", "document": 0}]')
        return Line(content="[]")

    graph.add_seed("Rivers")
    graph.add_seed("Glaciers")
    expander = PolicyExpander(ScriptedPolicy(script))
    asyncio.run(grow(graph, corpus, expander, GrowthConfig()))
    assert [node.name for node in graph.nodes()] == ["Rivers", "Glaciers", "Braldu"]
    assert graph.parents(3) == [1, 2]
    assert "textbook" in asked[0]


def test_deep_concepts_are_asked_for_operations():
    assert [criterion(depth) for depth in (0, 2, 3, 7)] == ["topic", "topic"] + ["operation"] * 2


def test_a_policy_that_never_gives_json_stops_the_growth(graph, corpus):
    graph.add_seed("Rivers")
    expander = PolicyExpander(ScriptedPolicy(lambda prompt: Line(content="I cannot say")))
    with pytest.raises(PolicyError, match="no usable answer in 3 tries"):
        asyncio.run(grow(graph, corpus, expander, GrowthConfig()))
    assert graph.frontier() is not None


# --- samples


def test_weights_prefer_the_deep_and_atomic_and_avoid_the_worn():
    node = Node(id=1, name="", summary="", depth=2, is_atomic=False, attempts=0)
    assert weight(node) == pytest.approx(math.e)
    assert weight(replace(node, is_atomic=True)) == pytest.approx(4 * math.e)
    assert weight(replace(node, attempts=3)) == pytest.approx(math.e / 4)


def test_every_strategy_gives_what_it_says(graph, corpus):
    grown(graph, corpus)
    samples = [draw_sample(graph, random.Random(seed)) for seed in range(80)]
    by_strategy: dict[str, list[Sample]] = {}
    for sample in samples:
        assert sample is not None
        by_strategy.setdefault(sample.strategy, []).append(sample)
    assert set(by_strategy) == {"leaf", "siblings", "root path", "cross domain"}
    for sample in by_strategy["leaf"]:
        assert not graph.children(sample.nodes[0].id)
    for sample in by_strategy["siblings"]:
        common = set.intersection(*({*graph.parents(node.id)} for node in sample.nodes))
        assert common
        assert len({node.id for node in sample.nodes}) == len(sample.nodes) >= 2
    for sample in by_strategy["root path"]:
        assert [node.depth for node in sample.nodes] == [0, 1, 2]
    for sample in by_strategy["cross domain"]:
        one, two = sample.nodes
        assert not graph.roots(one.id) & graph.roots(two.id)
    assert sum(node.attempts for node in graph.nodes()) == sum(
        len(sample.nodes) for sample in samples if sample
    )


def test_a_graph_of_seeds_has_no_samples(graph):
    graph.add_seed("alone")
    assert draw_sample(graph, random.Random(0)) is None
