"""Tool results and image parts of a conversation."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from baltoro.text.messages import image_parts, order_tool_results

ids = st.sampled_from(["a", "b", "c", 1, None])
calls = st.lists(
    st.fixed_dictionaries({"id": ids, "function": st.fixed_dictionaries({"name": ids})}), max_size=3
)
messages = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.just("assistant"), "tool_calls": calls}),
        st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": ids}),
        st.fixed_dictionaries({"role": st.just("tool"), "id": ids, "name": ids, "tool": ids}),
        st.fixed_dictionaries({"role": st.just("user"), "content": ids}),
        st.just("no message"),
    ),
    max_size=8,
)


def turn(*names: str) -> dict:
    return {
        "role": "assistant",
        "tool_calls": [{"id": name, "function": {"name": f"tool {name}"}} for name in names],
    }


def result(call_id, **extra) -> dict:
    return {"role": "tool", "tool_call_id": call_id, **extra}


@given(messages=messages)
def test_ordering_twice_changes_nothing_and_nothing_is_mutated(messages):
    before = copy.deepcopy(messages)
    ordered = order_tool_results(messages)
    assert messages == before
    assert order_tool_results(ordered) == ordered
    assert len(ordered) == len(messages)


def test_a_run_that_matches_whole_is_sorted_and_renamed():
    ordered = order_tool_results([turn("a", "b"), result("b", name="stale"), result("a")])
    assert [message["tool"] for message in ordered[1:]] == ["tool a", "tool b"]
    assert ordered[2]["name"] == "tool b" and "name" not in ordered[1]


def test_a_run_with_a_stranger_stays_as_it_came():
    for stranger in (result("x"), {"role": "tool"}, result(None)):
        conversation = [turn("a", "b"), result("b"), stranger, result("a")]
        assert order_tool_results(conversation) == conversation


def test_a_user_message_cuts_a_run_but_does_not_forget_the_calls():
    user = {"role": "user", "content": "wait"}
    ordered = order_tool_results([turn("a", "b"), result("b"), user, result("a")])
    assert [message.get("tool") for message in ordered[1:]] == ["tool b", None, "tool a"]
    forgotten = order_tool_results([turn("a"), turn(), result("a")])
    assert "tool" not in forgotten[2]


def test_of_duplicate_ids_the_first_call_counts():
    calls = [{"id": "a", "name": "first"}, {"id": "b", "name": "b"}, {"id": "a", "name": "last"}]
    conversation = [{"role": "assistant", "tool_calls": calls}, result("b"), result("a")]
    assert [message["tool"] for message in order_tool_results(conversation)[1:]] == ["first", "b"]


def test_ids_are_compared_as_text():
    calls = [{"id": 7, "name": "seven"}]
    ordered = order_tool_results([{"role": "assistant", "tool_calls": calls}, result("7")])
    assert ordered[1]["tool"] == "seven"


def test_image_parts_come_in_the_order_of_the_prompt():
    def picture(name: str) -> dict:
        return {"type": "image", "image": name}

    conversation = [
        {"role": "user", "content": [picture("1"), {"type": "text", "text": "x"}, picture("2")]},
        turn("a", "b"),
        result("b", content=[picture("4")]),
        result("a", content=[picture("3")]),
        {"role": "system", "tools": [1], "content": [picture("dropped")]},
        {"role": "developer", "content": [picture("skipped")]},
        {"role": "user", "content": "text"},
    ]
    assert [part["image"] for part in image_parts(conversation)] == ["1", "2", "3", "4"]
