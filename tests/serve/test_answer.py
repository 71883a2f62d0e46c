import json
from collections.abc import Sequence

import pytest

from baltoro.serve.answer import Answer, ChatReader, StopStrings, TextReader
from baltoro.text.reply import Delta, join, join_calls
from baltoro.text.tokenizer import train
from baltoro.text.vocabulary import Tokenizer

CALL = (
    '<|open|>tools<|sep|><|open|>call tool="read" index="1"<|sep|>'
    '<|open|>argument key="path" type="string"<|sep|>a.txt<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>"
)
END = "<|close|>message<|sep|><|end_of_msg|>"
WELL_FORMED = (
    "plan<|close|>think<|sep|><|open|>response<|sep|>Größe<|close|>response<|sep|>" + CALL + END
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(["plan text"], 512)


def read(
    tokenizer: Tokenizer, text: str, *, stop: Sequence[str] = (), has_tools: bool = True
) -> tuple[list[Delta], Answer]:
    reader = ChatReader(tokenizer, thinking=True, has_tools=has_tools, stop=stop)
    deltas = []
    for token_id in tokenizer.encode(text, allow_special=True):
        deltas.append(reader.feed(token_id))
        if reader.is_over:
            break
    last, answer = reader.finish("stop" if reader.is_over else "length")
    return [*deltas, last], answer


def test_the_pieces_add_up_to_the_answer(tokenizer: Tokenizer) -> None:
    deltas, answer = read(tokenizer, WELL_FORMED)
    assert join(deltas)[:2] == (answer.reasoning, answer.content)
    assert join_calls(deltas) == answer.tool_calls
    assert (answer.reasoning, answer.content) == ("plan", "Größe")
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [
        ("read", '{"path": "a.txt"}')
    ]
    assert answer.finish_reason == "tool_calls"


def test_every_cut_gives_pieces_that_add_up(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(WELL_FORMED, allow_special=True)
    for length in range(len(ids)):
        deltas, answer = read(tokenizer, tokenizer.decode(ids[:length]))  # X17
        assert join(deltas)[:2] == (answer.reasoning, answer.content)
        assert join_calls(deltas) == answer.tool_calls
        assert "<|" not in answer.reasoning + answer.content


def test_a_call_is_sent_as_it_is_written(tokenizer: Tokenizer) -> None:
    text = WELL_FORMED.replace("a.txt", 'Größe\n"' * 20)
    deltas, answer = read(tokenizer, text)  # vllm#50604
    parts = [part for delta in deltas for part in delta.call_parts]
    assert len(parts) > 100 and [part.name for part in parts if part.name] == ["read"]
    assert max(len(part.arguments) for part in parts) < 20
    (call,) = answer.tool_calls
    assert json.loads(call.arguments) == {"path": 'Größe\n"' * 20}


OPEN_TOOLS, RESPONSE = "<|open|>tools<|sep|>", "<|open|>response<|sep|>"
CLOSED = "<|close|>response<|sep|>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        (f"plan<|close|>think{RESPONSE}Here.{CLOSED}{END}", "plan", "Here.", 0),  # X01
        (f"plan{CALL}{END}", "plan", "", 1),  # X02, vllm#53246
        (f"plan{RESPONSE}Here.{CLOSED}{CALL}{END}", "plan", "Here.", 1),
        (f"4.{CLOSED}<|close|>message<|sep|>", "", "4.", 0),  # X03
        ("Hello<|close|>message<|sep|>", "", "Hello", 0),  # X04
        (f"{CALL}<|close|>message<|sep|>", "", "", 1),  # X06
        (f"{OPEN_TOOLS}please wait\u200b<|close|>tools<|sep|>{END}", "", "", 0),  # X07
        (f"<|close|>think<|sep|>{RESPONSE}{CALL}{CALL}{END}", "", "", 2),
    ],
)
def test_departures_from_the_format_are_streamed_as_they_are_answered(
    tokenizer: Tokenizer, text: str, reasoning: str, content: str, num_calls: int
) -> None:
    deltas, answer = read(tokenizer, text)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert join(deltas)[:2] == (reasoning, content) and join_calls(deltas) == answer.tool_calls
    assert len(answer.tool_calls) == answer.num_whole_calls == num_calls
    for call in answer.tool_calls:
        assert json.loads(call.arguments) == {"path": "a.txt"}


def test_a_call_that_is_cut_off_is_an_answer_as_far_as_it_came(tokenizer: Tokenizer) -> None:
    _, answer = read(tokenizer, WELL_FORMED[: WELL_FORMED.index(".txt")])
    assert [(c.name, c.arguments) for c in answer.tool_calls] == [("read", '{"path": "a')]
    assert answer.finish_reason == "length" and answer.num_whole_calls == 0
    text = WELL_FORMED.replace(CALL, CALL * 2)
    _, answer = read(tokenizer, text[: text.rindex(".txt")])
    assert [c.arguments for c in answer.tool_calls] == ['{"path": "a.txt"}', '{"path": "a']
    assert answer.finish_reason == "length" and answer.num_whole_calls == 1


def test_a_call_that_the_model_left_open_is_not_taken_for_an_answer(tokenizer: Tokenizer) -> None:
    text = WELL_FORMED.replace("Größe", "").replace("<|close|>call<|sep|>", "")
    _, answer = read(tokenizer, text)
    assert [call.arguments for call in answer.tool_calls] == ['{"path": "a.txt"']
    assert answer.is_empty and answer.is_lost
    assert answer.finish_reason == "stop"
    _, answer = read(tokenizer, text.replace(OPEN_TOOLS, CALL + OPEN_TOOLS))
    assert answer.num_whole_calls == 1 and len(answer.tool_calls) == 2
    assert answer.finish_reason == "tool_calls"


def test_reasoning_tokens_are_those_before_the_answer(tokenizer: Tokenizer) -> None:
    _, answer = read(tokenizer, "a" * 10)
    assert answer.num_reasoning_tokens == len(tokenizer.encode("a" * 10))
    _, answer = read(tokenizer, WELL_FORMED)
    assert 0 < answer.num_reasoning_tokens < len(tokenizer.encode(WELL_FORMED, allow_special=True))


def test_a_call_that_was_not_offered_is_shown_and_not_made(tokenizer: Tokenizer) -> None:
    _, answer = read(tokenizer, WELL_FORMED, has_tools=False)  # X10
    assert not answer.tool_calls and answer.finish_reason == "stop"
    assert "asked for a tool that was not offered" in answer.content


def test_an_answer_of_nothing_is_empty(tokenizer: Tokenizer) -> None:
    text = "plan<|close|>think<|sep|><|open|>response<|sep|> <|close|>response<|sep|>" + END
    assert read(tokenizer, text)[1].is_empty
    assert not read(tokenizer, WELL_FORMED)[1].is_empty


def test_a_stop_string_ends_the_content_and_not_the_reasoning(tokenizer: Tokenizer) -> None:
    _, answer = read(tokenizer, WELL_FORMED, stop=["la", "öß"])
    assert (answer.reasoning, answer.content, answer.finish_reason) == ("plan", "Gr", "stop")


@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_stop_strings_are_found_however_the_text_is_cut(size: int) -> None:
    text, strings = "one two three aaab end", ["aab", "two t!", ""]
    stop = StopStrings(strings)
    given = "".join(stop.feed(text[i : i + size]) for i in range(0, len(text), size))
    assert given == "one two three a" and stop.is_met and stop.end() == ""


def test_of_two_stop_strings_the_one_that_ends_first_counts_however_the_text_is_cut() -> None:
    for size in (1, 2, 3, 9):
        stop = StopStrings(["one two", "ne", "e t"])
        text = "an one two"
        given = "".join(stop.feed(text[i : i + size]) for i in range(0, len(text), size))
        assert given == "an o" and stop.is_met


def test_what_only_began_like_a_stop_string_is_given_in_the_end() -> None:
    stop = StopStrings(["end!"])
    assert stop.feed("the en") == "the " and stop.end() == "en" and not stop.is_met


def test_a_plain_text_is_read_without_its_special_tokens(tokenizer: Tokenizer) -> None:
    reader = TextReader(tokenizer, ["st"])
    for token_id in [*tokenizer.encode("ü"), tokenizer.eos_id, *tokenizer.encode("ber stop")]:
        reader.feed(token_id)
    _, answer = reader.finish("length")
    assert (answer.content, answer.finish_reason) == ("über ", "stop")
