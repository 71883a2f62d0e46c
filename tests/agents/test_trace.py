"""Records of episodes: on disk and back, after a crash, and as training sequences."""

import pytest

from baltoro.agents.failure import Failure, PolicyError, failure_of
from baltoro.agents.policy import Tokens
from baltoro.agents.trace import (
    CheckResult,
    CommitRecord,
    ContextRecord,
    EndRecord,
    ObservationRecord,
    Start,
    SubmissionRecord,
    Trace,
    TraceWriter,
    TurnRecord,
    read_trace,
)
from baltoro.sandbox.protocol import Binding, LimitError

START = Start(
    episode="e",
    group="g",
    task="t",
    task_digest="d",
    harness={"style": "plain"},
    policy="p",
    driver="process",
    seed=3,
    created_ns=1,
)
BINDING = Binding(token_position=3, prefix_hash="h", policy_version=0)
COMMIT = CommitRecord(turn=1, snapshot="s", binding=BINDING, sandbox="n")
FAILURE = Failure(boundary="policy", error="PolicyError", message="down")


def turn(number: int, tokens: Tokens | None = None, agent: str = "main") -> TurnRecord:
    return TurnRecord(
        agent=agent,
        turn=number,
        purpose="turn",
        message={"role": "assistant", "content": "hé", "tool_calls": [{"id": "1"}]},
        finish_reason="stop",
        num_prompt_tokens=5,
        num_output_tokens=2,
        policy_version=1,
        tokens=tokens,
        started_s=0.5,
        wall_s=0.25,
    )


def context(reason: str = "opening", agent: str = "main") -> ContextRecord:
    return ContextRecord(
        agent=agent,
        messages=({"role": "user", "content": "x"},),
        num_opening=1,
        reason=reason,  # type: ignore[arg-type]
    )


def tokens(first: int) -> Tokens:
    return Tokens(
        prompt_ids=(first, first + 1),
        ids=(first + 2,),
        logprobs=(-0.1 * first,),
        policy_versions=(first,),
    )


def every_record() -> list[object]:
    result = CheckResult(name="c", is_hidden=False, score=1.0, weight=2.0, detail="ok", wall_s=0.1)
    observation = ObservationRecord(
        agent="main",
        turn=0,
        call_id="1",
        tool="shell",
        arguments="{}",
        content="a\nb",
        is_error=False,
        started_s=1.0,
        wall_s=0.1,
    )
    return [
        START,
        context(),
        turn(0, tokens(7)),
        observation,
        SubmissionRecord(turn=1, results=(result,)),
        COMMIT,
        EndRecord(how="failed", failure=FAILURE, wall_s=3.0),
    ]


def test_every_kind_of_record_comes_back_from_disk(tmp_path):
    writer = TraceWriter(tmp_path / "runs/e.jsonl")
    for record in every_record():
        writer.add(record)
    writer.close()
    assert list(read_trace(tmp_path / "runs/e.jsonl").records) == every_record()


def test_half_a_line_at_the_end_is_dropped_and_a_damaged_one_named(tmp_path):
    path = tmp_path / "e.jsonl"
    TraceWriter(path, every_record()[:3]).close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert list(read_trace(path).records) == every_record()[:2]
    path.write_bytes(whole.replace(b'"turn":0', b'"turn":"x"'))
    with pytest.raises(ValueError, match="line 3 is no record"):
        read_trace(path)
    path.write_bytes(b'{"kind":"sta')
    with pytest.raises(ValueError, match="no whole record"):
        read_trace(path)


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "e.jsonl"
    TraceWriter(path, [START]).close()
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":9'))
    with pytest.raises(ValueError, match="version=9, this build reads 1"):
        read_trace(path)


def test_an_episode_resumes_at_its_last_commit():
    records = [START, context(), COMMIT, turn(0), COMMIT, turn(1)]
    assert list(Trace(records=tuple(records)).resumable()) == records[:5]
    assert Trace(records=(START, context())).resumable() == ()


def test_a_machine_failure_can_be_resumed_and_a_judged_end_cannot():
    failed = Trace(records=tuple(every_record()))
    assert failed.end is not None
    assert failed.end.outcome == "machine failure"
    assert not failed.is_over
    for how, outcome in (("answered", "judged"), ("turn_limit", "agent failure")):
        end = EndRecord(how=how, reward=0.0, wall_s=1.0)
        over = Trace(records=(START, end))
        assert over.is_over
        assert end.outcome == outcome


def test_a_context_becomes_one_sequence_and_the_next_another():
    records = (
        START,
        context(),
        turn(0, tokens(1)),
        context(agent="main/1"),
        turn(0, tokens(20), agent="main/1"),
        turn(1, tokens(4)),
        context("summary"),
        turn(2, tokens(8)),
    )
    first, second, sub = Trace(records=records).sequences()
    assert first.ids == (1, 2, 3, 4, 5, 6)
    assert first.is_sampled == (False, False, True) * 2
    assert first.logprobs == (0.0, 0.0, -0.1, 0.0, 0.0, -0.4)
    assert first.policy_versions == (-1, -1, 1, -1, -1, 4)
    assert {second.ids, sub.ids} == {(8, 9, 10), (20, 21, 22)}
    assert {second.agent, sub.agent} == {"main", "main/1"}


def test_a_policy_that_tells_no_tokens_gives_no_sequences():
    assert Trace(records=(START, context(), turn(0))).sequences() == []


def test_errors_are_attributed_to_their_boundary():
    assert failure_of(PolicyError("down")) == FAILURE
    assert failure_of(LimitError("full")).boundary == "sandbox"
    with pytest.raises(TypeError, match="no boundary"):
        failure_of(KeyError("x"))
