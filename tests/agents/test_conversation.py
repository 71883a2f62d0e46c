"""A context that grows, is shortened, and is rebuilt from its record."""

import pytest

from baltoro.agents.conversation import CLEARED, ContextPolicy, Conversation
from baltoro.agents.policy import Tokens
from baltoro.agents.trace import ContextRecord, ObservationRecord, TurnRecord

OPENING = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})


def records(num_turns: int, *, with_tokens: bool = False) -> list[object]:
    found: list[object] = [
        ContextRecord(agent="main", messages=OPENING, num_opening=2, reason="opening")
    ]
    for turn in range(num_turns):
        tokens = Tokens(
            prompt_ids=(10 * turn,),
            ids=(10 * turn + 1,),
            logprobs=(0.0,),
            policy_versions=(turn,),
        )
        found.append(
            TurnRecord(
                agent="main",
                turn=turn,
                purpose="turn",
                message={"role": "assistant", "content": f"a{turn}"},
                finish_reason="tool_calls",
                num_prompt_tokens=100 * (turn + 1),
                num_output_tokens=7,
                policy_version=turn,
                tokens=tokens if with_tokens else None,
                started_s=0.0,
                wall_s=0.0,
            )
        )
        found.append(
            ObservationRecord(
                agent="main",
                turn=turn,
                call_id=f"c{turn}",
                tool="shell",
                arguments="{}",
                content=f"result {turn}",
                is_error=False,
                started_s=0.0,
                wall_s=0.0,
            )
        )
    return found


def conversation(num_turns: int, *, with_tokens: bool = False) -> Conversation:
    talk = Conversation("main")
    for record in records(num_turns, with_tokens=with_tokens):
        talk.replay(record)
    return talk


def test_a_replayed_conversation_has_the_messages_turns_and_tokens():
    talk = conversation(2, with_tokens=True)
    assert [message["role"] for message in talk.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    assert talk.turn == 2
    assert talk.num_output_tokens == 14
    assert talk.prefix is not None
    assert talk.prefix.ids == (0, 1, 10, 11)
    assert talk.prefix.num_messages == 5
    assert talk.policy_version == 1


def test_records_of_another_agent_are_passed_over():
    talk = Conversation("main/1")
    for record in records(2):
        talk.replay(record)
    assert talk.messages == []


def test_its_size_is_what_the_policy_counted_plus_what_came_since():
    talk = conversation(2)
    assert 207 < talk.num_tokens < 260


def test_a_place_is_told_apart_by_its_messages_and_its_tokens():
    assert conversation(2).binding() == conversation(2).binding()
    assert conversation(2).binding() != conversation(1).binding()
    with_ids = conversation(2, with_tokens=True).binding()
    assert with_ids.prefix_hash != conversation(2).binding().prefix_hash
    assert with_ids.token_position == 4


def test_clearing_removes_old_results_and_keeps_the_last():
    talk = conversation(3, with_tokens=True)
    record = talk.cleared(keep_turns=1)
    contents = [message["content"] for message in record.messages if message["role"] == "tool"]
    assert contents == [CLEARED, CLEARED, "result 2"]
    talk.begin(record)
    assert talk.prefix is None
    assert talk.turn == 3


def test_a_summary_stands_for_all_but_the_opening_and_the_last_turns():
    record = conversation(3).summarised(OPENING, "all went well", keep_turns=1)
    roles = [message["role"] for message in record.messages]
    assert roles == ["system", "user", "user", "assistant", "tool"]
    assert "all went well" in record.messages[2]["content"]
    assert record.messages[-1]["content"] == "result 2"


def test_compaction_waits_for_the_threshold_and_for_something_to_leave_out():
    low, high = (ContextPolicy(compact_at_tokens=tokens, keep_turns=2) for tokens in (150, 100000))
    assert conversation(3).needs_compaction(low)
    assert not conversation(3).needs_compaction(high)
    assert not conversation(2).needs_compaction(low)
    assert not conversation(3).needs_compaction(ContextPolicy(compact_at_tokens=None))
    clear = ContextPolicy(compact_at_tokens=150, keep_turns=2, method="clear")
    talk = conversation(3)
    assert talk.needs_compaction(clear)
    talk.begin(talk.cleared(2))
    talk.num_tokens = 500
    assert not talk.needs_compaction(clear)


def test_a_threshold_above_the_limit_is_refused():
    with pytest.raises(ValueError, match="compact_at_tokens=9"):
        ContextPolicy(max_tokens=8, compact_at_tokens=9)
    with pytest.raises(ValueError, match="keep_turns=-1"):
        ContextPolicy(keep_turns=-1)
