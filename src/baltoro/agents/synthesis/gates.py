"""Gates that a draft passes before it is a task, in the order of what they cost.

    grounded      every quote is in the corpus, the question stands alone (mechanical), and a judge
                  says that the quotes prove the answer
    non-trivial   a policy without tools does not know the answer, in any of several samples
    unique        an adversary with the solver's harness finds no other answer that holds
    solvable      several rollouts, of which at least one succeeds

What a gate says is written to a ledger and not asked again; `inconclusive` (a machine failed) is
neither passed nor failed and is tried again. The rate of successes gives the difficulty:

    exp(-(m - 0.4)^2 / (2 * 0.25^2)) * std / sqrt(m (1 - m))        m = mean reward

0 for a group without variance, from which a mean baseline learns nothing.
"""

import math
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Literal

from pydantic import TypeAdapter

from baltoro.agents.failure import PolicyError
from baltoro.agents.guest.answer import same_answer
from baltoro.agents.harness import Harness
from baltoro.agents.policy import Policy
from baltoro.agents.rollout import Runner
from baltoro.agents.synthesis.ask import ask_json, ask_text
from baltoro.agents.synthesis.corpus import Corpus
from baltoro.agents.synthesis.write import Draft, adversary_task, problems, solver_task
from baltoro.agents.task import Task
from baltoro.agents.trace import EndRecord
from baltoro.config import digest
from baltoro.sandbox.protocol import Limits

Status = Literal["passed", "failed", "inconclusive"]
TARGET_RATE, RATE_WIDTH = 0.4, 0.25
SCHEMA = """
CREATE TABLE IF NOT EXISTS gates (
    draft TEXT NOT NULL, gate TEXT NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL,
    pass_rate REAL, difficulty REAL, PRIMARY KEY (draft, gate));
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    """What a gate said about a draft."""

    gate: str
    status: Status
    reason: str = ""
    pass_rate: float | None = None  # of the gate that has rollouts
    difficulty: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """How hard the gates look."""

    image: str
    limits: Limits
    num_baselines: int = 3
    num_adversaries: int = 1
    num_rollouts: int = 5

    def __post_init__(self) -> None:
        if min(self.num_baselines, self.num_adversaries, self.num_rollouts) < 1:
            raise ValueError(
                f"gates.num_baselines={self.num_baselines!r}, num_adversaries="
                f"{self.num_adversaries!r}, num_rollouts={self.num_rollouts!r}: at least 1 each"
            )


class Ledger:
    """What the gates said, on disk."""

    def __init__(self, path: Path):
        self._db = sqlite3.connect(path)
        with self._db:
            self._db.executescript(SCHEMA)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def get(self, draft: str, gate: str) -> GateResult | None:
        """A verdict that stands: passed or failed."""
        row = self._db.execute(
            "SELECT status, reason, pass_rate, difficulty FROM gates WHERE draft = ? AND gate = ?"
            " AND status != 'inconclusive'",
            (draft, gate),
        ).fetchone()
        if row is None:
            return None
        return GateResult(
            gate=gate, status=row[0], reason=row[1], pass_rate=row[2], difficulty=row[3]
        )

    def put(self, draft: str, result: GateResult) -> None:
        """Write down a verdict."""
        with self._db:
            self._db.execute(
                "INSERT OR REPLACE INTO gates VALUES (?, ?, ?, ?, ?, ?)",
                (
                    draft,
                    result.gate,
                    result.status,
                    result.reason,
                    result.pass_rate,
                    result.difficulty,
                ),
            )


def difficulty(rewards: Sequence[float]) -> float:
    """How much a group with these rewards is worth to reinforcement learning, in 0..1."""
    mean, deviation = fmean(rewards), pstdev(rewards)
    if deviation == 0.0:
        return 0.0
    near = math.exp(-((mean - TARGET_RATE) ** 2) / (2 * RATE_WIDTH**2))
    return near * deviation / math.sqrt(mean * (1 - mean))


class Gates:
    """The gates, with whom they ask."""

    def __init__(
        self,
        *,
        corpus: Corpus,
        solver: Policy,
        judge: Policy,
        harness: Harness,
        runner: Runner,
        ledger: Ledger,
        config: GateConfig,
    ):
        """`solver` answers and attacks under `harness`; `judge` reads quotes."""
        self._corpus = corpus
        self._solver = solver
        self._judge = judge
        self._harness = harness
        self._runner = runner
        self._ledger = ledger
        self._config = config

    async def run(self, draft: Draft) -> tuple[list[GateResult], Task | None]:
        """Verdicts up to the first that is not `passed`, and the task if all are."""
        gates: dict[str, Callable[[Draft], Awaitable[GateResult]]] = {
            "grounded": self._grounded,
            "non-trivial": self._non_trivial,
            "unique": self._unique,
            "solvable": self._solvable,
        }
        results = []
        for name, gate in gates.items():
            result = self._ledger.get(draft.id, name)
            if result is None:
                try:
                    result = await gate(draft)
                except PolicyError as error:
                    result = GateResult(gate=name, status="inconclusive", reason=str(error))
                self._ledger.put(draft.id, result)
            results.append(result)
            if result.status != "passed":
                return results, None
        return results, self._accepted(draft, results[-1])

    def _accepted(self, draft: Draft, solvable: GateResult) -> Task:
        task = self._solver_task(draft)
        facts = {
            "pass_rate": f"{solvable.pass_rate}",
            "difficulty": f"{solvable.difficulty}",
            "harness": digest(self._harness.config),
            "solver": self._solver.name,
        }
        return replace(task, source=task.source | facts)

    async def _grounded(self, draft: Draft) -> GateResult:
        wrong = problems(draft, self._corpus)
        if wrong:
            return GateResult(gate="grounded", status="failed", reason="; ".join(wrong))
        quotes = "\n\n".join(quote.text for quote in draft.quotes)
        if await self._holds(draft.question, draft.answer, quotes):
            return GateResult(gate="grounded", status="passed")
        return GateResult(
            gate="grounded", status="failed", reason="the quotes do not prove the answer"
        )

    async def _non_trivial(self, draft: Draft) -> GateResult:
        question = f"{draft.question}\n\nAnswer as briefly as possible, with the answer alone."
        for seed in range(self._config.num_baselines):
            answer = await ask_text(self._solver, question, seed=seed)
            if same_answer(answer, draft.answer):
                reason = f"answered without looking it up, sample {seed}"
                return GateResult(gate="non-trivial", status="failed", reason=reason)
        return GateResult(gate="non-trivial", status="passed")

    async def _unique(self, draft: Draft) -> GateResult:
        task = adversary_task(
            draft, self._corpus, image=self._config.image, limits=self._config.limits
        )
        traces = await self._runner.run_group(
            task,
            self._harness,
            self._solver,
            group=task.id,
            num_rollouts=self._config.num_adversaries,
            seed=0,
        )
        for trace in traces:
            end = trace.end
            if end is None or end.reward is None:
                return GateResult(gate="unique", status="inconclusive", reason=_why(end))
            if end.reward == 1.0:
                answer, quote = await self._found(end.snapshot, task)
                if await self._holds(draft.question, answer, quote):
                    reason = f"{answer[:200]!r} is right as well"
                    return GateResult(gate="unique", status="failed", reason=reason)
        return GateResult(gate="unique", status="passed")

    async def _solvable(self, draft: Draft) -> GateResult:
        task = self._solver_task(draft)
        traces = await self._runner.run_group(
            task,
            self._harness,
            self._solver,
            group=task.id,
            num_rollouts=self._config.num_rollouts,
            seed=0,
        )
        rewards = []
        for trace in traces:
            if trace.end is None or trace.end.reward is None:
                return GateResult(gate="solvable", status="inconclusive", reason=_why(trace.end))
            rewards.append(trace.end.reward)
        rate = fmean(rewards)
        status: Status = "passed" if rate > 0.0 else "failed"
        return GateResult(
            gate="solvable",
            status=status,
            reason="" if rate else "no rollout succeeded",
            pass_rate=rate,
            difficulty=difficulty(rewards),
        )

    def _solver_task(self, draft: Draft) -> Task:
        return solver_task(
            draft, self._corpus, image=self._config.image, limits=self._config.limits
        )

    async def _holds(self, question: str, answer: str, quotes: str) -> bool:
        """Whether the judge says that passages prove an answer."""
        text = (
            f"Question: {question}\nAnswer: {answer}\nPassages:\n{quotes}\n\nDo the passages prove"
            ' that this answer is right? Answer with JSON: {"holds": true} or {"holds": false}.'
        )
        return (await ask_json(self._judge, text, HOLDS))["holds"]

    async def _found(self, snapshot: str | None, task: Task) -> tuple[str, str]:
        """The answer and the quote that an adversary left."""
        assert snapshot is not None
        keeper = self._runner.keeper
        name = keeper.take(snapshot)
        try:
            async with keeper.use(name) as sandbox:
                answer = await sandbox.read(task.place("answer.txt"))
                quote = await sandbox.read(task.place("quote.txt"))
        finally:
            await keeper.destroy(name)
        return answer.decode(errors="replace").strip(), quote.decode(errors="replace").strip()


def _why(end: EndRecord | None) -> str:
    if end is None:
        return "a rollout was paused"
    assert end.failure is not None
    return f"{end.failure.boundary}: {end.failure.message}"


HOLDS: TypeAdapter[dict[Literal["holds"], bool]] = TypeAdapter(dict[Literal["holds"], bool])
