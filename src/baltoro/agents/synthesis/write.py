"""Drafts of tasks: a question, its answer, and the passages that prove it.

A writer makes a draft from sampled concepts and documents; `problems` checks it mechanically, and a
draft with problems goes no further. Two profiles: `lookup`, whose answer stands in a quoted
passage, and `derive`, whose answer must be computed and stands nowhere. The solver gets the whole
corpus and not only the cited documents, or it would have nothing to find.
"""

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from baltoro.agents.guest.answer import MIN_QUOTE_CHARS, number, words
from baltoro.agents.policy import Policy
from baltoro.agents.synthesis.ask import ask_json
from baltoro.agents.synthesis.corpus import Corpus, Document, squeezed
from baltoro.agents.synthesis.expand import shown
from baltoro.agents.synthesis.graph import Graph
from baltoro.agents.synthesis.sample import Sample
from baltoro.agents.task import RESULT, Check, Task, TaskFile
from baltoro.sandbox.protocol import Limits

Profile = Literal["lookup", "derive"]
MAX_DOCUMENTS = 6
MIN_QUOTE_WORDS = 3
ANSWER = Path(__file__).parents[1] / "guest" / "answer.py"
FOLDER = ".verify"
# A question must stand alone: who reads it has not seen what the writer saw.
POINTS_AT_SOURCE = re.compile(
    r"\b(the|this|that|these|given|above)\s+"
    r"(paper|document|text|article|passage|source|section|chapter|author|corpus)s?\b",
    re.IGNORECASE,
)
CHANGES_WITH_TIME = re.compile(
    r"\b(today|now|currently|latest|newest|most recent|this year|so far|up to date)\b",
    re.IGNORECASE,
)
DICTATES = re.compile(
    r"\b(add|subtract|multiply|divide|plus|minus|times|the sum of|the product of)\b", re.IGNORECASE
)
SENTENCE = re.compile(r"[^.!?\n]*[.!?]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Quote:
    """A passage, word for word."""

    document: str  # id
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A task before it is one."""

    question: str
    answer: str
    profile: Profile
    quotes: tuple[Quote, ...]
    concepts: tuple[str, ...]
    strategy: str
    corpus: str  # fingerprint

    @property
    def id(self) -> str:
        """Twelve hex digits of its question and answer."""
        text = json.dumps([self.question, self.answer, self.corpus])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def problems(draft: Draft, corpus: Corpus) -> list[str]:
    """What is mechanically wrong with a draft; empty if nothing is."""
    found = []
    if draft.corpus != corpus.fingerprint:
        found.append("it was written over another corpus")
    if not draft.quotes:
        found.append("it has no quote")
    for quote in draft.quotes:
        if not corpus.holds(quote.document, quote.text):
            found.append(f"quote {quote.text[:60]!r} is not in its document word for word")
        letters = [word for word in words(quote.text) if word.isalpha()]
        if len(squeezed(quote.text)) < MIN_QUOTE_CHARS or len(letters) < MIN_QUOTE_WORDS:
            found.append(f"quote {quote.text[:60]!r} is too short or a bare number")
    if POINTS_AT_SOURCE.search(draft.question):
        found.append("the question points at a source that its reader does not see")
    if CHANGES_WITH_TIME.search(draft.question):
        found.append("the answer changes with time")
    if not words(draft.answer):
        found.append("the answer is empty")
    elif _stands_in(draft.answer, draft.question):
        found.append("the answer stands in the question")
    found += _answer_problems(draft, corpus)
    return found


def _answer_problems(draft: Draft, corpus: Corpus) -> list[str]:
    if draft.profile == "lookup":
        if any(_stands_in(draft.answer, quote.text) for quote in draft.quotes):
            return []
        return ["the answer stands in none of its quotes"]
    found = []
    if DICTATES.search(draft.question):
        found.append("the question dictates the arithmetic")
    if number(draft.answer) is None:
        found.append("a derived answer must be a number")
    if any(_stands_in(draft.answer, each.text) for each in corpus.documents.values()):
        found.append("the answer to be derived stands in a document")
    return found


def _stands_in(answer: str, text: str) -> bool:
    """Whether the words of an answer stand in a text next to one another."""
    wanted, given = words(answer), words(text)
    width = len(wanted)
    return any(given[at : at + width] == wanted for at in range(len(given) - width + 1))


def sample_documents(sample: Sample, graph: Graph, corpus: Corpus) -> list[Document]:
    """What a writer reads: the evidence of the concepts, then what searches for them find.

    Every query holds a concept, with what it is part of to tell it from its namesakes.
    """
    found: list[Document] = []
    for node in sample.nodes:
        found += [corpus.documents[each] for each in graph.documents(node.id)]
    for node in sample.nodes[:MAX_DOCUMENTS]:
        found += corpus.search(" ".join([node.name, *sample.context]))
    return list({each.id: each for each in found}.values())[:MAX_DOCUMENTS]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Passage:
    document: int  # number of the document
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    question: str
    answer: str
    quotes: tuple[_Passage, ...]


_WRITTEN: TypeAdapter[_Written] = TypeAdapter(_Written)


class PolicyWriter:
    """Asks a policy."""

    def __init__(self, policy: Policy, profile: Profile):
        self._policy = policy
        self._profile = profile

    async def draft(
        self, sample: Sample, documents: Sequence[Document], corpus: Corpus, seed: int
    ) -> Draft | None:
        wanted = {
            "lookup": "whose short answer stands in the passages you quote",
            "derive": "whose answer is a number that must be computed from facts in the passages"
            " you quote; do not say how to compute it",
        }[self._profile]
        concepts = ", ".join(node.name for node in sample.nodes)
        question = (
            f"{shown(documents)}\n\nWrite one question about: {concepts}\nIt must be one {wanted}."
            " It must stand alone, without mention of any text, have exactly one right answer,"
            " and be hard to answer without looking things up. Quote the passages that prove the"
            ' answer word for word. Answer with JSON: {"question", "answer", "quotes":'
            ' [{"document", "text"}]}, where document is its number.'
        )
        written = await ask_json(self._policy, question, _WRITTEN, seed=seed)
        quotes = tuple(
            Quote(document=documents[each.document].id, text=each.text)
            for each in written.quotes
            if 0 <= each.document < len(documents)
        )
        return _draft(written.question, written.answer, self._profile, quotes, sample, corpus)


class GapWriter:
    """The stand-in: leaves a name or a number out of a sentence."""

    async def draft(
        self, sample: Sample, documents: Sequence[Document], corpus: Corpus, seed: int
    ) -> Draft | None:
        drawn = random.Random(seed)
        found = []
        for document in documents:
            for match in SENTENCE.finditer(document.text):
                sentence = squeezed(match[0])
                words_of = sentence.split()
                if not 8 <= len(words_of) <= 40 or sentence.startswith(("#", "|", "-")):
                    continue
                for word in words_of[1:]:
                    bare = word.strip(".,;:()!?\"'`*")
                    is_wanted = bare[:1].isupper() or number(bare) is not None
                    if is_wanted and sentence.count(bare) == 1:
                        found.append((document, sentence, bare))
        if not found:
            return None
        document, sentence, answer = drawn.choice(found)
        question = f"Which name or number belongs in the gap?\n\n{sentence.replace(answer, '____')}"
        quotes = (Quote(document=document.id, text=sentence),)
        return _draft(question, answer, "lookup", quotes, sample, corpus)


def _draft(
    question: str,
    answer: str,
    profile: Profile,
    quotes: tuple[Quote, ...],
    sample: Sample,
    corpus: Corpus,
) -> Draft:
    return Draft(
        question=question.strip(),
        answer=answer.strip(),
        profile=profile,
        quotes=quotes,
        concepts=tuple(node.name for node in sample.nodes),
        strategy=sample.strategy,
        corpus=corpus.fingerprint,
    )


def solver_task(draft: Draft, corpus: Corpus, *, image: str, limits: Limits) -> Task:
    """The task to answer a draft's question from the corpus."""
    prompt = (
        f"{draft.question}\n\nThe folder corpus holds texts to search. Write the answer, as short"
        " as possible and nothing else, to answer.txt."
    )
    return _task(f"ask-{draft.id}", prompt, draft, "same", corpus, image, limits)


def adversary_task(draft: Draft, corpus: Corpus, *, image: str, limits: Limits) -> Task:
    """The task to find another right answer to a draft's question, with a quote that proves it."""
    prompt = (
        f"{draft.question}\n\nSomeone says that the only right answer is: {draft.answer}\nThe"
        " folder corpus holds texts to search. Find another answer that is right as well. Write it"
        " to answer.txt, and the passage that proves it, word for word, to quote.txt. If there is"
        " no other right answer, write neither."
    )
    return _task(f"other-{draft.id}", prompt, draft, "other", corpus, image, limits)


def _task(
    task_id: str,
    prompt: str,
    draft: Draft,
    mode: Literal["same", "other"],
    corpus: Corpus,
    image: str,
    limits: Limits,
) -> Task:
    expected = json.dumps({"answer": draft.answer, "mode": mode}).encode()
    texts = tuple(
        TaskFile(path=f"corpus/{each.name}", data=each.text.encode())
        for each in corpus.documents.values()
    )
    check = Check(
        name="answer",
        argv=("python3", "-I", "-B", f"{FOLDER}/answer.py", RESULT, f"{FOLDER}/expected.json"),
        files=(
            TaskFile(path=f"{FOLDER}/answer.py", data=ANSWER.read_bytes()),
            TaskFile(path=f"{FOLDER}/expected.json", data=expected),
            *texts,  # as they were, whatever the agent wrote there
        ),
    )
    return Task(
        id=task_id,
        prompt=prompt,
        checks=(check,),
        image=image,
        files=texts,
        judged_in="fresh",
        limits=limits,
        source={
            "corpus": draft.corpus,
            "concepts": "; ".join(draft.concepts),
            "strategy": draft.strategy,
            "profile": draft.profile,
        },
    )
