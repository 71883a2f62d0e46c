"""Growing a graph: the shallowest open concept is looked up in the corpus and made finer.

Two expanders: a policy that reads the documents, and a deterministic stand-in that follows the
headings of Markdown. Near the seeds, children are topics as a textbook has sections; deeper, they
are operations that can be carried out. A child counts only with a document that was fetched for it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import TypeAdapter

from baltoro.agents.policy import Policy
from baltoro.agents.synthesis.ask import ask_json
from baltoro.agents.synthesis.corpus import Corpus, Document, squeezed
from baltoro.agents.synthesis.graph import Child, Graph, Node

Criterion = Literal["topic", "operation"]
OPERATIONS_FROM_DEPTH = 3
MAX_DOCUMENT_CHARS = 6000
HEADING = re.compile(r"^(#{1,6})\s+(.+?)\s*#*$", re.MULTILINE)

TOPICS = "sections that a textbook would give it, each narrower than the concept itself"
OPERATIONS = "procedures that can be carried out or computed, each named by what it does"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A finer concept that an expander suggests."""

    name: str
    summary: str
    document: int  # which of the documents it was given shows it, from 0


class Expander(Protocol):
    """Makes concepts finer."""

    async def children(
        self, node: Node, coarser: Sequence[str], documents: Sequence[Document]
    ) -> list[Proposal]:
        """Finer concepts; none if the node is atomic."""

    async def is_same(self, proposal: Proposal, node: Node) -> bool:
        """Whether a proposal means the same as a node that is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthConfig:
    """How far a graph grows."""

    max_expansions: int = 50  # in one run
    max_children: int = 8
    max_depth: int = 8
    max_documents: int = 6  # read for one expansion


async def grow(graph: Graph, corpus: Corpus, expander: Expander, config: GrowthConfig) -> int:
    """Expand the frontier; returns how many nodes were expanded. Goes on where a run stopped."""
    for count in range(config.max_expansions):
        node = graph.frontier()
        if node is None:
            return count
        coarser = [graph.node(each).name for each in sorted(graph.ancestors(node.id))]
        documents = _documents(graph, corpus, node, coarser, config.max_documents)
        children: list[Child] = []
        proposals = await expander.children(node, coarser, documents) if documents else []
        for proposal in proposals[: config.max_children]:
            if not 0 <= proposal.document < len(documents) or not proposal.name.strip():
                continue
            children.append(
                Child(
                    name=proposal.name.strip(),
                    summary=proposal.summary,
                    documents=(documents[proposal.document].id,),
                    same_as=await _same(graph, expander, proposal),
                )
            )
        graph.expand(node.id, children, max_depth=config.max_depth)
    return config.max_expansions


def criterion(depth: int) -> Criterion:
    """What the children of a node at this depth should be."""
    return "topic" if depth < OPERATIONS_FROM_DEPTH else "operation"


class PolicyExpander:
    """Asks a policy that is shown the documents."""

    def __init__(self, policy: Policy):
        self._policy = policy

    async def children(
        self, node: Node, coarser: Sequence[str], documents: Sequence[Document]
    ) -> list[Proposal]:
        wanted = TOPICS if criterion(node.depth) == "topic" else OPERATIONS
        question = (
            f"Concept: {node.name}\nPart of: {', '.join(coarser) or 'nothing'}\n\n"
            f"{shown(documents)}\n\nList finer concepts that these documents treat: {wanted}. "
            'Answer with a JSON list of {"name", "summary", "document"}, the last being the number '
            "of the document. Answer [] if the concept cannot be divided further."
        )
        return await ask_json(self._policy, question, PROPOSALS)

    async def is_same(self, proposal: Proposal, node: Node) -> bool:
        question = (
            f"One: {proposal.name}: {proposal.summary}\nOther: {node.name}: {node.summary}\n"
            'Do both name the same concept? Answer with JSON: true or false, as {"same": ...}.'
        )
        return (await ask_json(self._policy, question, SAME))["same"]


class HeadingExpander:
    """The stand-in: a concept is a heading, its children are the headings below it."""

    async def children(
        self, node: Node, coarser: Sequence[str], documents: Sequence[Document]
    ) -> list[Proposal]:
        found = []
        is_heading = any(
            name.casefold() == node.name.casefold()
            for document in documents
            for _, name, _ in headings(document.text)
        )
        for index, document in enumerate(documents):
            wanted = node.name if is_heading else None
            for name, summary in _below(document.text, wanted):
                found.append(Proposal(name=name, summary=summary, document=index))
        return found

    async def is_same(self, proposal: Proposal, node: Node) -> bool:
        return proposal.name.casefold() == node.name.casefold()


def shown(documents: Sequence[Document]) -> str:
    """Documents as a policy sees them, numbered and cut to a length."""
    return "\n\n".join(
        f"--- document {index}: {document.name}\n{document.text[:MAX_DOCUMENT_CHARS]}"
        for index, document in enumerate(documents)
    )


def headings(text: str) -> Iterator[tuple[int, str, str]]:
    """Level, name and the text below each Markdown heading, up to the next one."""
    found = list(HEADING.finditer(text))
    for index, match in enumerate(found):
        end = found[index + 1].start() if index + 1 < len(found) else len(text)
        yield len(match[1]), match[2], squeezed(text[match.end() : end])


def _below(text: str, name: str | None) -> Iterator[tuple[str, str]]:
    """Headings one level below the heading of that name; the topmost ones for None."""
    levels = list(headings(text))
    inside = 0 if name is None else None  # the level we are below
    child_level: int | None = None
    for level, title, body in levels:
        if inside is not None and name is not None and level <= inside:
            inside, child_level = None, None
        if inside is not None:
            child_level = level if child_level is None else min(child_level, level)
            if level == child_level:
                yield title, body[:200]
        elif name is not None and title.casefold() == name.casefold():
            inside, child_level = level, None


def _documents(
    graph: Graph, corpus: Corpus, node: Node, coarser: Sequence[str], max_documents: int
) -> list[Document]:
    """What is read for an expansion: the node's own evidence, then what a search finds."""
    known = [corpus.documents[each] for each in graph.documents(node.id)]
    for document in corpus.search(" ".join([node.name, *coarser]), max_documents):
        if document not in known:
            known.append(document)
    return known[:max_documents]


async def _same(graph: Graph, expander: Expander, proposal: Proposal) -> int | None:
    for candidate in graph.similar(proposal.name):
        if await expander.is_same(proposal, candidate):
            return candidate.id
    return None


PROPOSALS: TypeAdapter[list[Proposal]] = TypeAdapter(list[Proposal])
SAME: TypeAdapter[dict[Literal["same"], bool]] = TypeAdapter(dict[Literal["same"], bool])
