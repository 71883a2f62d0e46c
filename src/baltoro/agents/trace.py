"""The record of an episode: frozen records, one JSON line each, written as they happen.

    start        which task, harness, policy, seed; the version of this format
    context      the messages a context begins with (a new one after each compaction)
    turn         one reply of a policy, with its tokens if the policy tells them
    observation  what one tool call gave back
    submission   public checks run for the agent
    commit       the world's snapshot at this place of the conversation: an episode resumes here
    end          how it ended and what it earned, or the machine failure that ended it

The last line may be half a line after a crash; it is dropped. An episode that has no `end`, or that
ended in a machine failure, goes on from its last commit; what came after is forgotten, since the
world is taken back there too.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from baltoro.agents.failure import Failure
from baltoro.agents.policy import FinishReason, Purpose, Tokens
from baltoro.sandbox.protocol import Binding

FORMAT_VERSION = 1
How = Literal["answered", "turn_limit", "token_limit", "cut_off", "sandbox_limit", "failed"]
Outcome = Literal["judged", "agent failure", "machine failure"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What was run."""

    kind: Literal["start"] = "start"
    version: int = FORMAT_VERSION
    episode: str
    group: str  # of the rollouts that are compared
    task: str  # id
    task_digest: str
    harness: dict[str, Any]  # the whole configuration
    policy: str  # name
    driver: str  # of the sandbox
    seed: int
    created_ns: int  # wall clock, Unix


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextRecord:
    """A context begins."""

    kind: Literal["context"] = "context"
    agent: str
    messages: tuple[dict[str, Any], ...]
    num_opening: int  # how many of them every context of this agent begins with
    reason: Literal["opening", "summary", "clear"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRecord:
    """A policy's reply."""

    kind: Literal["turn"] = "turn"
    agent: str
    turn: int
    purpose: Purpose
    message: dict[str, Any]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    policy_version: int
    tokens: Tokens | None
    problems: tuple[str, ...] = ()  # departures from the format
    started_s: float  # since the episode began, without pauses
    wall_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservationRecord:
    """A tool call and its result."""

    kind: Literal["observation"] = "observation"
    agent: str
    turn: int
    call_id: str
    tool: str  # as the model called it
    arguments: str  # as the model wrote them
    content: str
    is_error: bool
    started_s: float
    wall_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """What one check said."""

    name: str
    is_hidden: bool
    score: float  # in 0..1
    weight: float
    detail: str  # end of its output, or why it counts as 0
    wall_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmissionRecord:
    """The public checks, run because the agent asked."""

    kind: Literal["submission"] = "submission"
    turn: int
    results: tuple[CheckResult, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitRecord:
    """The world as it was here."""

    kind: Literal["commit"] = "commit"
    turn: int  # turns of the main agent so far
    snapshot: str
    binding: Binding
    sandbox: str  # the keeper's name for it
    is_pause: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRecord:
    """The end."""

    kind: Literal["end"] = "end"
    how: How
    results: tuple[CheckResult, ...] = ()
    num_submissions: int = 0
    reward: float | None = None  # None: not judged
    snapshot: str | None = None  # the final state that was judged
    failure: Failure | None = None
    wall_s: float

    @property
    def outcome(self) -> Outcome:
        """A judged end, the agent's own failure (judged all the same), or the machine's."""
        if self.failure is not None:
            return "machine failure"
        return "judged" if self.how == "answered" else "agent failure"


Record = Annotated[
    Start
    | ContextRecord
    | TurnRecord
    | ObservationRecord
    | SubmissionRecord
    | CommitRecord
    | EndRecord,
    Field(discriminator="kind"),
]
RECORD: TypeAdapter[Any] = TypeAdapter(Record)
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequence:
    """One context of one agent as tokens; the columns are aligned."""

    agent: str
    ids: tuple[int, ...]
    is_sampled: tuple[bool, ...]  # by the policy; else prompt
    logprobs: tuple[float, ...]  # 0 where not sampled
    policy_versions: tuple[int, ...]  # -1 where not sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """An episode's records in order."""

    records: tuple[Any, ...] = field(repr=False)

    @property
    def start(self) -> Start:
        """The first record."""
        first = self.records[0]
        assert isinstance(first, Start)
        return first

    @property
    def end(self) -> EndRecord | None:
        """The last record if the episode is over."""
        last = self.records[-1]
        return last if isinstance(last, EndRecord) else None

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to resume: it ended, and not in a machine failure."""
        return self.end is not None and self.end.outcome != "machine failure"

    def of(self, kind: type[R]) -> list[R]:
        """The records of one class."""
        return [record for record in self.records if isinstance(record, kind)]

    def resumable(self) -> tuple[Any, ...]:
        """The records up to the last commit; none if nothing was committed."""
        for index in range(len(self.records) - 1, -1, -1):
            if isinstance(self.records[index], CommitRecord):
                return self.records[: index + 1]
        return ()

    def sequences(self) -> list[TokenSequence]:
        """Every context as tokens, for training, in the order in which they ended.

        Contexts whose policy told no tokens are left out. A summary ends the context it sums up.
        """
        found: list[TokenSequence] = []
        open_turns: dict[str, list[Tokens]] = {}
        for record in self.records:
            if isinstance(record, ContextRecord):
                found += _sequence(record.agent, open_turns.pop(record.agent, []))
            elif isinstance(record, TurnRecord) and record.tokens is not None:
                open_turns.setdefault(record.agent, []).append(record.tokens)
        for agent, turns in open_turns.items():
            found += _sequence(agent, turns)
        return found


class TraceWriter:
    """Appends records to a file."""

    def __init__(self, path: Path, records: Iterable[Any] = ()):
        """Begin with `records`, replacing what is there as a whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        work = path.with_name(path.name + ".work")
        self.records = list(records)
        work.write_bytes(b"".join(_line(record) for record in self.records))
        work.rename(path)
        self._file = path.open("ab")

    def add(self, record: Any) -> None:
        """Write one record; a commit or an end reaches the disk before this returns."""
        self.records.append(record)
        self._file.write(_line(record))
        self._file.flush()
        if isinstance(record, (CommitRecord, EndRecord)):
            os.fsync(self._file.fileno())

    def trace(self) -> Trace:
        """What was written so far."""
        return Trace(records=tuple(self.records))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_trace(path: Path) -> Trace:
    """Read a record file; half a line at the end is dropped.

    `ValueError` for another version of the format, or naming the line that is damaged.
    """
    *lines, _half = path.read_bytes().split(b"\n")
    if not lines:
        raise ValueError(f"{path}: holds no whole record")
    version = _version(lines[0])
    if version != FORMAT_VERSION:
        raise ValueError(f"{path}: version={version!r}, this build reads {FORMAT_VERSION}")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(RECORD.validate_json(line))
        except ValidationError as error:
            raise ValueError(f"{path}: line {number} is no record: {error}") from error
    return Trace(records=tuple(records))


def _line(record: Any) -> bytes:
    return bytes(RECORD.dump_json(record)) + b"\n"


def _version(line: bytes) -> Any:
    try:
        first = json.loads(line)
    except ValueError:
        return None
    return first.get("version") if isinstance(first, dict) else None


def _sequence(agent: str, turns: list[Tokens]) -> list[TokenSequence]:
    if not turns:
        return []
    ids: list[int] = []
    is_sampled: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in turns:
        num_added, num_sampled = len(turn.prompt_ids), len(turn.ids)
        ids += [*turn.prompt_ids, *turn.ids]
        is_sampled += [False] * num_added + [True] * num_sampled
        logprobs += [0.0] * num_added + list(turn.logprobs)
        versions += [-1] * num_added + list(turn.policy_versions)
    return [
        TokenSequence(
            agent=agent,
            ids=tuple(ids),
            is_sampled=tuple(is_sampled),
            logprobs=tuple(logprobs),
            policy_versions=tuple(versions),
        )
    ]
