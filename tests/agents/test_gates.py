"""Drafts of tasks and the gates they pass, each policy a script."""

import asyncio
import json
import math
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
from agents.texts import LIMITS, document, grown
from agents.worlds import DONE, World, plain_harness, run_in_world, sh

from baltoro.agents.failure import PolicyError
from baltoro.agents.guest.answer import same_answer
from baltoro.agents.policy import Line, Policy, PolicyReply, Prompt, ScriptedPolicy
from baltoro.agents.synthesis.corpus import Corpus
from baltoro.agents.synthesis.gates import GateConfig, GateResult, Gates, Ledger, difficulty
from baltoro.agents.synthesis.graph import Graph, Node
from baltoro.agents.synthesis.sample import Sample
from baltoro.agents.synthesis.write import (
    Draft,
    GapWriter,
    PolicyWriter,
    Quote,
    problems,
    sample_documents,
)
from baltoro.agents.task import Task

# --- drafts


def draft_of(texts: Corpus, /, **changes: object) -> Draft:
    fields: dict[str, object] = {
        "question": "At which village does the Baltoro meltwater join the Braldu?",
        "answer": "Askole",
        "profile": "lookup",
        "quotes": (
            Quote(
                document=document(texts, "rivers.md").id,
                text="join the Braldu river at the village of Askole",
            ),
        ),
        "concepts": ("Baltoro streams",),
        "strategy": "leaf",
        "corpus": texts.fingerprint,
    }
    return Draft(**(fields | changes))  # type: ignore[arg-type]


def test_a_good_draft_has_no_problems(corpus):
    assert problems(draft_of(corpus), corpus) == []
    derived = draft_of(corpus, profile="derive", answer="104", question="How much is both?")
    assert problems(derived, corpus) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"quotes": ()}, "no quote"),
        ({"question": "What does the paper say?"}, "points at a source"),
        ({"question": "Which village is currently there?"}, "changes with time"),
        ({"question": "Is it the askole, or another?"}, "stands in the question"),
        ({"answer": " "}, "the answer is empty"),
        ({"answer": "Skardu"}, "in none of its quotes"),
        ({"corpus": "x"}, "another corpus"),
        ({"profile": "derive", "answer": "41"}, "stands in a document"),
        ({"profile": "derive", "answer": "many"}, "must be a number"),
        ({"profile": "derive", "answer": "7", "question": "Add them."}, "dictates"),
    ],
)
def test_what_is_wrong_with_a_draft_is_said(corpus, changes, complaint):
    found = problems(draft_of(corpus, **changes), corpus)
    assert any(complaint in each for each in found), found


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("the village of Skardu and its people", "word for word"),
        ("41 cubic", "too short"),
    ],
)
def test_quotes_must_be_passages(corpus, text, complaint):
    quote = Quote(document=document(corpus, "rivers.md").id, text=text)
    found = problems(draft_of(corpus, quotes=(quote,)), corpus)
    assert any(complaint in each for each in found), found


def sample_of(graph: Graph, name: str) -> Sample:
    (node,) = (node for node in graph.nodes() if node.name == name)
    context = tuple(graph.node(each).name for each in sorted(graph.ancestors(node.id)))
    return Sample(strategy="leaf", nodes=(node,), context=context)


def test_the_stand_in_writes_drafts_without_problems(graph, corpus):
    sample = sample_of(grown(graph, corpus), "Gauges")
    documents = sample_documents(sample, graph, corpus)
    assert documents[0].name == "rivers.md"
    drafts = [asyncio.run(GapWriter().draft(sample, documents, corpus, seed)) for seed in range(20)]
    assert all(draft is not None and problems(draft, corpus) == [] for draft in drafts)
    assert {draft.answer for draft in drafts if draft} >= {"63", "Askole"}
    assert drafts[0] == asyncio.run(GapWriter().draft(sample, documents, corpus, 0))


def test_the_stand_in_gives_up_where_there_is_nothing_to_leave_out(graph):
    plain = Corpus([("a.md", "nothing in here has a name or any number at all.")])
    node = Node(id=1, name="n", summary="", depth=0, is_atomic=True, attempts=0)
    sample = Sample(strategy="leaf", nodes=(node,), context=())
    documents = list(plain.documents.values())
    assert asyncio.run(GapWriter().draft(sample, documents, plain, 0)) is None
    plain.close()


def test_a_policy_writes_a_draft_with_quotes(graph, corpus):
    sample = sample_of(grown(graph, corpus), "Gauges")
    documents = sample_documents(sample, graph, corpus)
    text = "join the Braldu river at the village of Askole"
    written = {
        "question": "Where?",
        "answer": "Askole",
        "quotes": [{"document": 0, "text": text}, {"document": 7, "text": "x"}],
    }
    policy = ScriptedPolicy(lambda prompt: Line(content=json.dumps(written)))
    draft = asyncio.run(PolicyWriter(policy, "lookup").draft(sample, documents, corpus, 0))
    assert draft is not None
    assert problems(draft, corpus) == []
    assert draft.concepts == ("Gauges",)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("Askole", " askole.\n", True),
        ("the Braldu river", "Braldu River", True),
        ("1,024", "1024.0", True),
        ("63", "64", False),
        ("Askole", "Askole village", False),
        ("1e3", "1000", True),
    ],
)
def test_answers_are_compared_by_value_or_by_words(one, other, is_same):
    assert same_answer(one, other) == is_same


# --- gates


def test_difficulty_peaks_where_there_is_most_to_learn():
    assert difficulty([1.0, 1.0, 1.0]) == 0.0
    assert difficulty([0.0, 0.0]) == 0.0
    peak = difficulty([1.0, 1.0, 0.0, 0.0, 0.0])
    assert peak == pytest.approx(1.0)
    assert difficulty([1.0, 0.0, 0.0, 0.0, 0.0]) == pytest.approx(math.exp(-0.04 / 0.125))
    assert difficulty([0.5, 0.3]) < peak


def solver(answers: Sequence[str], *, known: str = "no idea", other: str | None = None) -> Policy:
    """Answers rollouts in turn, is asked the question alone, and attacks with `other`."""
    left = list(answers)

    def script(prompt: Prompt) -> Line:
        question = str(prompt.messages[-1]["content"])
        if not prompt.tools:
            return Line(content=known)
        if prompt.turn > 0:
            return DONE
        if "Someone says" in question:
            if other is None:
                return DONE
            quote = "The glacier is 63 kilometres long and lies in the Karakoram range"
            return sh(f"echo '{other}' > answer.txt; echo '{quote}' > quote.txt")
        return sh(f"echo '{left.pop(0)}' > answer.txt")

    return ScriptedPolicy(script, "solver")


def judge_that_says(*verdicts: bool) -> Policy:
    left = list(verdicts)
    return ScriptedPolicy(lambda prompt: Line(content=json.dumps({"holds": left.pop(0)})), "judge")


def gated(
    tmp_path: Path,
    corpus: Corpus,
    answering: Policy,
    judging: Policy,
    draft: Draft | None = None,
) -> tuple[list[GateResult], Task | None]:
    found: list[tuple[list[GateResult], Task | None]] = []

    async def body(here: World) -> None:
        ledger = Ledger(tmp_path / "ledger.db")
        gates = Gates(
            corpus=corpus,
            solver=answering,
            judge=judging,
            harness=plain_harness(),
            runner=here.runner(),
            ledger=ledger,
            config=GateConfig(image="default", limits=LIMITS),
        )
        try:
            found.append(await gates.run(draft or draft_of(corpus)))
        finally:
            ledger.close()

    run_in_world(tmp_path, body)
    return found[0]


def statuses(results: Sequence[GateResult]) -> list[tuple[str, str]]:
    return [(result.gate, result.status) for result in results]


def test_a_draft_that_passes_every_gate_is_a_task_with_its_difficulty(tmp_path, corpus):
    answers = ["Askole", "Skardu", "askole", "none", "none"]
    results, task = gated(tmp_path, corpus, solver(answers), judge_that_says(True))
    assert statuses(results) == [
        ("grounded", "passed"),
        ("non-trivial", "passed"),
        ("unique", "passed"),
        ("solvable", "passed"),
    ]
    assert results[-1].pass_rate == pytest.approx(0.4)
    assert results[-1].difficulty == pytest.approx(1.0)
    assert task is not None
    assert float(task.source["difficulty"]) == pytest.approx(1.0)
    assert task.source["corpus"] == corpus.fingerprint
    assert {file.path for file in task.files} == {"corpus/rivers.md", "corpus/glaciers.md"}


def test_a_gate_stops_what_it_is_for(tmp_path, corpus):
    cases = {
        "mechanical": (solver([]), judge_that_says(), draft_of(corpus, quotes=())),
        "entailment": (solver([]), judge_that_says(False), None),
        "trivial": (solver([], known="Askole"), judge_that_says(True), None),
        "ambiguous": (solver([], other="Karakoram"), judge_that_says(True, True), None),
        "unsolvable": (solver(["x"] * 5), judge_that_says(True), None),
    }
    reasons = {}
    for name, (answering, judging, draft) in cases.items():
        (tmp_path / name).mkdir()
        results, task = gated(tmp_path / name, corpus, answering, judging, draft)
        assert task is None
        assert results[-1].status == "failed"
        reasons[name] = (results[-1].gate, results[-1].reason)
    assert reasons == {
        "mechanical": ("grounded", "it has no quote; the answer stands in none of its quotes"),
        "entailment": ("grounded", "the quotes do not prove the answer"),
        "trivial": ("non-trivial", "answered without looking it up, sample 0"),
        "ambiguous": ("unique", "'Karakoram' is right as well"),
        "unsolvable": ("solvable", "no rollout succeeded"),
    }


def test_another_answer_that_does_not_hold_is_no_objection(tmp_path, corpus):
    answers = ["Askole"] * 5
    judging = judge_that_says(True, False)
    results, task = gated(tmp_path, corpus, solver(answers, other="Karakoram"), judging)
    assert ("unique", "passed") in statuses(results)
    assert task is not None
    assert task.source["difficulty"] == "0.0"


def test_what_a_gate_said_is_not_asked_again_and_a_machine_failure_is(tmp_path, corpus):
    class Down(ScriptedPolicy):
        async def reply(self, prompt: Prompt) -> PolicyReply:
            if "Someone says" in str(prompt.messages):
                raise PolicyError("down")
            return await super().reply(prompt)

    down = Down(lambda prompt: Line(content="no idea"), "solver")
    results, task = gated(tmp_path, corpus, down, judge_that_says(True))
    assert statuses(results)[-1] == ("unique", "inconclusive")
    assert "policy: down" in results[-1].reason
    assert task is None
    # the judge has nothing more to say, and is not asked
    results, task = gated(tmp_path, corpus, solver(["Askole"] * 5), judge_that_says())
    assert statuses(results)[-1] == ("solvable", "passed")
    with sqlite3.connect(tmp_path / "ledger.db") as ledger:
        assert ledger.execute("SELECT count(*) FROM gates").fetchone() == (4,)
    ledger.close()
