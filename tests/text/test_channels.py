"""Parsing: well-formed replies, what models make of the format, and cuts at every place.

[O], [C], [S] and [E] stand for the four markers; outputs start inside the think channel.
"""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baltoro.text.arguments import Argument
from baltoro.text.channels import IdParser, TextParser, parse, parse_ids
from baltoro.text.markers import MARKERS
from baltoro.text.reply import Delta, Reply, ToolCall, join, join_calls
from baltoro.text.xtml import render

WELL_FORMED = (
    '[O]think[S]plan[C]think[S][O]response[S]text[C]response[S][O]tools[S][O]call tool="read" '
    'index="1"[S][O]argument key="path" type="string"[S]a.txt[C]argument[S][C]call[S][C]tools[S]'
    "[C]message[S][E]"
)
TO_RESPONSE = "r[C]think[S][O]response[S]"
TO_TOOLS = "r[C]think[S][O]response[S][C]response[S][O]tools[S]"
END = "[C]message[S][E]"


def spelled(text: str) -> str:
    for letter, marker in zip("OCSE", MARKERS, strict=True):
        text = text.replace(f"[{letter}]", marker)
    return text


def parsed(text: str, **options) -> Reply:
    return parse(spelled(text), **options)


def argument(text: str, kind: str = "string", key: str = "k") -> str:
    return f'[O]argument key="{key}" type="{kind}"[S]{text}[C]argument[S]'


def call(*arguments: str, tool: str = "f") -> str:
    return f'[O]call tool="{tool}" index="1"[S]{"".join(arguments)}[C]call[S]'


def calls(text: str, **options) -> list[tuple[str, object]]:
    """Names and argument values of the calls in a tools channel that holds `text`."""
    reply = parsed(f"{TO_TOOLS}{text}[C]tools[S]{END}", **options)
    return [(found.name, json.loads(found.arguments)) for found in reply.tool_calls]


def value_of(text: str, kind: str) -> object:
    [(_, arguments)] = calls(call(argument(text, kind)))
    return arguments["k"]


def channels(reply: Reply) -> tuple[str | None, str | None, int]:
    return reply.reasoning, reply.content, len(reply.tool_calls)


def test_a_well_formed_reply_has_all_its_parts():
    assert parsed(WELL_FORMED) == Reply(
        reasoning="plan",
        content="text",
        tool_calls=(ToolCall("read", '{"path": "a.txt"}', (Argument("path", "string", "a.txt"),)),),
        is_complete=True,
    )
    assert parsed(WELL_FORMED).finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        ("step[C]think[S][O]response[S]answer", "step", "answer", 0),
        ("unfinished reasoning", "unfinished reasoning", None, 0),
        (".[C]think[S][O]response[S]天地玄黄", ".", "天地玄黄", 0),
        ("thinking<|se", "thinking", None, 0),
        ("done[C]think[S][O]resp", "done", None, 0),
        (f'{TO_TOOLS}[O]call tool="f" index="1"[S][O]argument key="c"[S]Par', "r", None, 0),
        ("plan[O]tools[S]" + call(), "plan", None, 1),
        ("plan[O]response[S]answer", "plan", "answer", 0),
        ("The answer is 4.[C]response[S][C]message[S]", None, "The answer is 4.", 0),
        (TO_TOOLS + call() + call() + '[O]call tool="f"[S]', "r", None, 2),
        # The closing of think lacks its separator, and so do its neighbours.
        ("Both.[C]think[O]response[S]It is.[C]response[S][C]message[S]", "Both.", "It is.", 0),
        ("Both.[C]think[O]response\nIt is.[C]response[C]message[E]", "Both.", "\nIt is.", 0),
        ("Both.[C]think\nIt is.", "Both.", "It is.", 0),
        (f"Both.[C]think[O]tools{call()}[C]tools[C]message[S]", "Both.", None, 1),
        ("Hello[C]message[S]", None, "Hello", 0),
        ("Hello[E]", "Hello", None, 0),
        (f"[O]tools[S]{call(argument('San Francisco'))}[C]tools[S][C]message[S]", None, None, 1),
        (f"4.[C]response[S][O]tools[S]{call()}[C]tools[S]{END}", None, "4.", 1),
        ("[C]response[S][C]message[S]", None, None, 0),
        ("a[C]think[S][O]think[S]b[C]response[S]c", "ab", "c", 0),
        ("", None, None, 0),
    ],
)
def test_thinking_outputs(text, reasoning, content, num_calls):
    assert channels(parsed(text)) == (reasoning, content, num_calls)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        ("Hello[C]message[S]", None, "Hello", 0),
        ("answer[E]trailing", None, "answer", 0),
        ("a[S]b", None, "ab", 0),
        ("text from the first token", None, "text from the first token", 0),
        ("a[C]response[S]b", None, "a", 0),
        (f"a[C]response[S][O]tools[S]{call()}[C]tools[S]{END}", None, "a", 1),
        ("[O]think[S]plan[C]think[S][O]response[S]a", "plan", "a", 0),
        ("[O]think[S]plan[C]think[S] a", "plan", "a", 0),
        ("[O]response[S]a", None, "a", 0),
        ('answer[O]message role="user"[S]forged', None, "answer", 0),
        ('[O]message role="assistant"[S][O]response[S]a', None, "a", 0),
    ],
)
def test_outputs_without_thinking(text, reasoning, content, num_calls):
    assert channels(parsed(text, thinking=False)) == (reasoning, content, num_calls)


@pytest.mark.parametrize("filler", ["工具", "please wait", "\u200b", "", "\n"])
def test_a_tools_channel_with_filler_only_is_no_call(filler):
    for end in ("[C]tools[S][C]message[S][E]", ""):
        reply = parsed(f"{TO_RESPONSE}Look.[C]response[S][O]tools[S]{filler}{end}")
        assert channels(reply) == ("r", "Look.", 0)
        assert reply.finish_reason == ("stop" if end else "length")


def test_filler_between_calls_is_dropped():
    assert calls(f"wait {call()} and {call()} done") == [("f", {}), ("f", {})]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("a.txt", "string", "a.txt"),
        ('{"a":1}', "string", '{"a":1}'),
        ("1e2", "string", "1e2"),
        ("", "string", ""),
        ("1e2", "number", 100.0),
        ("3", "number", 3),
        ("three or four", "number", "three or four"),
        ("", "number", ""),
        ('{"timeout": 150}', "object", {"timeout": 150}),
        ("true", "boolean", True),
        ("True", "boolean", "True"),
        ("null", "null", None),
        ("[1,2]", "array", [1, 2]),
        ("NaN", "number", "NaN"),
        ("[" * 5000, "array", "[" * 5000),
        ('"quoted"', "integer", "quoted"),
        ('世界\n\t"q"', "string", '世界\n\t"q"'),
    ],
)
def test_values_follow_their_declared_type(text, kind, value):
    assert value_of(text, kind) == value


def test_numbers_of_any_length_are_kept():
    [found] = parsed(TO_TOOLS + call(argument("1" * 5000, "number"))).tool_calls
    assert found.arguments == '{"k": ' + "1" * 5000 + "}"


def test_a_number_keeps_the_spelling_of_the_model():
    [found] = parsed(TO_TOOLS + call(argument("1e2", "number"))).tool_calls
    assert json.loads(found.arguments) == {"k": 100.0}
    assert found.raw == (Argument("k", "number", "1e2"),)
    assert "[S]1e2[C]argument" in rendered_again(found)


def rendered_again(found: ToolCall) -> str:
    reply = Reply(reasoning=None, content=None, tool_calls=(found,))
    text = "".join(part.text for part in render([reply.message(["id"])]))
    return text.replace("<|sep|>", "[S]").replace("<|close|>", "[C]")


def test_a_call_without_arguments_has_an_empty_object():
    assert calls(call()) == [("f", {})]


def test_of_a_key_given_twice_the_last_value_counts_and_both_stay_raw():
    text = call(argument("1", "number"), argument("2", "number"))
    assert calls(text) == [("f", {"k": 2})]
    [found] = parsed(TO_TOOLS + text).tool_calls
    assert [part.text for part in found.raw] == ["1", "2"]


def test_missing_attributes_have_defaults():
    assert calls(call('[O]argument type="string"[S]orphan[C]argument[S]')) == [
        ("f", {"": "orphan"})
    ]
    assert calls(call('[O]argument key="k"[S]1[C]argument[S]')) == [("f", {"k": "1"})]
    assert calls('[O]call index="1"[S][C]call[S]') == []
    assert calls('[O]call tool=""[S][C]call[S]') == []


@pytest.mark.parametrize(
    ("attribute", "name"),
    [
        ("weather&amp;&quot;alerts", 'weather&"alerts'),
        ("say &amp;quot;hi&amp;quot;", "say &quot;hi&quot;"),
        ("a < b > c", "a < b > c"),
        ("&lt;", "&lt;"),
        ("工具 one", "工具 one"),
    ],
)
def test_attributes_are_unescaped_once(attribute, name):
    assert calls(call(tool=attribute)) == [(name, {})]


def test_other_attributes_and_their_order_do_not_matter():
    assert calls('[O]call index="x" extra="1" tool="f"[S][C]call[S]') == [("f", {})]
    assert calls('[O]call index=1 tool="f"[S][C]call[S]') == [("f", {})]


def test_a_value_may_hold_markers_that_do_not_end_it():
    value = "use [O]think[S] and [S], not [C]think[S] or [O]thinking[S]"
    assert value_of(value, "string") == spelled(value)


def test_a_value_ends_where_its_surroundings_end():
    open_argument = '[O]argument key="k" type="string"[S]v'
    for end in ("[C]call[S]", f"{argument('w', key='l')}[C]call[S]"):
        [(_, arguments)] = calls(f'[O]call tool="f"[S]{open_argument}{end}')
        assert arguments["k"] == "v"
    for end in ("[C]tools[S]", "[C]message[S]", "[E]"):
        text = f'[O]call tool="f"[S]{open_argument}{end}'
        assert calls(text) == []
        reply = parsed(f"{TO_TOOLS}{text}[O]response[S]after")
        assert reply.content == ("after" if end == "[C]tools[S]" else None)
        assert reply.is_complete == (end != "[C]tools[S]")
    two = f'[O]call tool="f"[S]{open_argument}{call(tool="g")}'
    assert calls(two) == [("g", {})]


def test_a_json_block_is_read_if_it_is_an_object():
    block = '[O]json type="object"[S]{"a": 1e2, "b": "x"}[C]json[S]'
    assert calls(call(block)) == [("f", {"a": 100.0, "b": "x"})]
    reply = parsed(TO_TOOLS + call('[O]json type="object"[S]{"city": Paris[C]json[S]'))
    assert reply.tool_calls[0].arguments == '{"city": Paris'
    assert "json block is no object" in reply.problems


def test_a_call_outside_the_tools_channel_counts_if_it_is_named():
    reply = parsed(f"{TO_RESPONSE}a{call()}{END}")
    assert channels(reply) == ("r", "a", 1)
    assert channels(parsed(f"{TO_RESPONSE}a[O]call me[S]b{END}")) == ("r", "ab", 0)


def test_calls_of_undeclared_tools_are_kept_apart():
    text = f"{TO_TOOLS}{call()}[C]tools[S]{END}"
    reply = parsed(text, tools_declared=False)
    assert reply.tool_calls == () and [found.name for found in reply.undeclared_calls] == ["f"]
    assert reply.finish_reason == "stop"
    parser = TextParser(tools_declared=False)
    assert parser.feed(spelled(text)).tool_calls == ()


def test_without_tools_a_plain_answer_is_a_plain_answer():
    reply = parsed(f"37 * 19[C]think[S][O]response[S]703[C]response[S]{END}", tools_declared=False)
    assert channels(reply) == ("37 * 19", "703", 0) and reply.problems == ()


def test_a_reply_cut_anywhere_inside_think_is_partial_reasoning():
    text = spelled("partial[C]think[S]")
    for length in range(len("partial"), len(text)):
        reply = parse(text[:length])
        assert channels(reply) == ("partial", None, 0)
        assert (reply.finish_reason, reply.open_channel) == ("length", "think")
    assert parse(text).finish_reason == "length"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("r", "length"),
        (f"{TO_RESPONSE}a", "length"),
        (f"{TO_RESPONSE}a[C]response[S]", "stop"),
        (f"{TO_RESPONSE}a[C]response[S]{END}", "stop"),
        (f"{TO_TOOLS}{call()}", "length"),
        (f"{TO_TOOLS}{call()}[C]tools[S]", "tool_calls"),
        (f"{TO_TOOLS}{call()}[C]tools[S]{END}", "tool_calls"),
        ("r[E]", "stop"),
    ],
)
def test_the_finish_reason_says_how_the_message_ended(text, reason):
    assert parsed(text).finish_reason == reason


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("r[O]response[S]", "think not closed"),
        ("a[C]response[S]", "think skipped"),
        ("r[C]think[S]a", "response not opened"),
        (f"{TO_RESPONSE}a[C]response[S]b", "text outside channels"),
        (f"{TO_TOOLS}b", "text between calls"),
        (f"{TO_TOOLS}[C]tools[S]", "tools without a call"),
        (f"{TO_TOOLS}[O]call[S][C]call[S]", "call without a name"),
        (f'{TO_TOOLS}[O]call tool="f"[S]', "call not closed"),
        (f"{TO_RESPONSE}{call()}", "call outside tools"),
        ("r[O]message[S]", "message not closed"),
    ],
)
def test_departures_from_the_format_are_noted(text, problem):
    assert problem in parsed(text).problems


def test_a_close_of_a_longer_word_is_no_tag():
    assert channels(parsed("a[C]thinking[S]b")) == ("athinkingb", None, 0)
    assert channels(parsed("a[C]thinkSo")) == ("a", "So", 0)


def test_blanks_around_a_tag_name_do_not_hide_it():
    assert channels(parsed("a[C] think [S][O] response [S]b")) == ("a", "b", 0)


def test_a_header_without_end_does_not_swallow_the_answer():
    text = f"{TO_RESPONSE}a[O]argument {'x' * 70_000}"
    assert parsed(text).content == "a " + "x" * 70_000


def deltas_of(parser, pieces) -> list[Delta]:
    return [parser.feed(piece) for piece in pieces]


def assert_adds_up(deltas: list[Delta], reply: Reply) -> None:
    reasoning, content, found = join(deltas)
    assert (reasoning or None, content or None) == (reply.reasoning, reply.content)
    assert found == reply.tool_calls
    if "json block is no object" not in reply.problems:
        begun = iter(join_calls(deltas))
        for one in found:
            assert any(one.name == other.name and same(one, other) for other in begun)


def same(one: ToolCall, other: ToolCall) -> bool:
    """Whether two calls have the same arguments; a key may stand twice in one that was streamed."""
    return other.arguments.endswith("}") and json.loads(one.arguments) == json.loads(
        other.arguments
    )


def parts_of(parser, whole) -> tuple[ToolCall, ...]:
    return join_calls([parser.feed(whole)])


SKIPPED_THINK = f"The answer is 4.[C]response[S][O]tools[S]{call()}[C]tools[S]{END}"


@pytest.mark.parametrize("text", [WELL_FORMED, SKIPPED_THINK], ids=["well formed", "skipped think"])
def test_two_chunks_cut_anywhere_add_up_to_one_shot(text):
    text = spelled(text)
    whole = parse(text)
    for cut in range(len(text) + 1):
        parser = TextParser()
        deltas = deltas_of(parser, [text[:cut], text[cut:]])
        assert parser.finish() == whole
        assert_adds_up(deltas, whole)


@pytest.mark.parametrize("size", [1, 3, 7, 20])
@pytest.mark.parametrize("text", [WELL_FORMED, SKIPPED_THINK], ids=["well formed", "skipped think"])
def test_chunks_of_tokens_add_up_to_one_shot(small_bpe, text, size):
    ids = small_bpe.encode(spelled(text), allow_special=True)
    parser = IdParser(small_bpe)
    deltas = deltas_of(parser, [ids[at : at + size] for at in range(0, len(ids), size)])
    assert parser.finish() == parse(spelled(text)) == parse_ids(ids, small_bpe)
    assert_adds_up(deltas, parse(spelled(text)))


def test_text_streams_as_it_comes_and_no_marker_leaks():
    parser = TextParser()
    sent = [parser.feed(char).reasoning for char in spelled("ab<c[C]think[S]")]
    assert sent[:5] == ["a", "b", "", "<c", ""] and "".join(sent) == "ab<c"


def test_a_call_is_sent_once_and_whole_when_it_closes():
    parser = TextParser(thinking=False)
    text = spelled(f"[O]tools[S]{call(argument('v'))}")
    sent = [parser.feed(char).tool_calls for char in text]
    assert [len(found) for found in sent[:-1]] == [0] * (len(text) - 1) and len(sent[-1]) == 1


def test_a_call_comes_in_parts_from_its_name_on():
    parser = TextParser(thinking=False)
    numbers = '[O]argument key="n" type="number"[S]12[C]argument[S]'
    text = spelled(f"[O]tools[S]{call(argument('v'), numbers)}")
    parts = [part for char in text for part in parser.feed(char).call_parts]
    assert parts[0].name and not any(part.name for part in parts[1:])
    pieces = [part.arguments for part in parts]
    assert pieces == ["", '{"k": ', '"', "v", '"', ', "n": ', "12", "}"]


def test_reasoning_that_was_the_answer_is_retracted():
    parser = TextParser()
    assert parser.feed("The answer") == Delta(reasoning="The answer")
    assert parser.feed(spelled(" is 4.[C]response[S]")) == Delta(
        content="The answer is 4.", retracts_reasoning=True
    )
    in_one_piece = TextParser().feed(spelled("4.[C]response[S]"))
    assert in_one_piece == Delta(content="4.") and bool(in_one_piece) and not Delta()


def test_nothing_counts_after_the_message():
    parser = TextParser()
    parser.feed(spelled(WELL_FORMED))
    assert parser.is_over and parser.feed(spelled(TO_RESPONSE)) == Delta()
    assert parser.finish() == parsed(WELL_FORMED)


def test_a_marker_spelled_in_ordinary_tokens_stays_text(small_bpe):
    def ids(text: str, special: bool) -> list[int]:
        return small_bpe.encode(spelled(text), allow_special=special)

    literal = "write [C]response[S] and [E]"
    all_ids = ids("[O]response[S]", True) + ids(literal, False) + ids("[C]response[S]", True)
    assert parse_ids(all_ids, small_bpe).content == spelled(literal)


def test_both_stop_tokens_end_the_message_and_other_specials_are_skipped(small_bpe):
    hello = small_bpe.encode("hello")
    for stop_id in small_bpe.stop_ids:
        reply = parse_ids([*hello, stop_id, *hello], small_bpe, thinking=False)
        assert reply.content == "hello" and reply.is_complete
    other = small_bpe.special_ids["[EOT]"]
    assert parse_ids([*hello, other, *hello], small_bpe, thinking=False).content == "hello" * 2


def test_characters_cut_between_tokens_come_out_whole(small_bpe):
    text = "日本語 🎉"
    ids = small_bpe.encode(text)
    assert len(ids) > len(text)
    parser = IdParser(small_bpe, thinking=False)
    sent = [parser.feed([token_id]).content for token_id in ids]
    assert "".join(sent) == text and "\ufffd" not in "".join(sent)
    after = small_bpe.encode(spelled("[C]think[S][O]response[S]b"), allow_special=True)
    assert channels(parse_ids([*ids[:1], *after], small_bpe)) == ("\ufffd", "b", 0)


def test_a_reply_becomes_the_message_that_renders_to_it():
    reply = parsed(WELL_FORMED)
    prompt = render([{"role": "user", "content": "Hi"}])
    again = render([{"role": "user", "content": "Hi"}, reply.message(["x"])])
    text = "".join(segment.text for segment in again)
    before = "".join(segment.text for segment in prompt[:-3])
    assert text.startswith(before + spelled(WELL_FORMED))
    with pytest.raises(ValueError, match="there are 1"):
        reply.message()


PIECES = [
    *MARKERS,
    *("think", "response", "tools", "message", "call", "argument", "json"),
    *(' tool="f"', ' key="k"', ' type="number"', '="', "1e2", '{"a": 1}', "[1,", "&quot;"),
    *("text", "<", "<|", "|>", "\n", " ", "世", "Z", "-", "\x00", "\ud800"),
    *(spelled(part) for part in (TO_RESPONSE, TO_TOOLS, call(argument("v")), END, "[C]call[S]")),
]
soup = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@settings(max_examples=300)
@given(text=soup, thinking=st.booleans(), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_marker_soup_never_raises_and_cuts_never_matter(text, thinking, cuts):
    reply = parse(text, thinking=thinking)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parser = TextParser(thinking=thinking)
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    deltas = deltas_of(parser, pieces)
    assert parser.finish() == reply
    assert_adds_up(deltas, reply)
    assert join_calls(deltas) == parts_of(TextParser(thinking=thinking), text)
    assert reply.finish_reason in ("stop", "length", "tool_calls")
    for found in reply.tool_calls:
        if "json block is no object" not in reply.problems:
            assert isinstance(json.loads(found.arguments), dict)


@settings(max_examples=150)
@given(
    ids=st.lists(st.integers(0, 319), max_size=60), thinking=st.booleans(), size=st.integers(1, 9)
)
def test_token_soup_never_raises_and_cuts_never_matter(small_bpe, ids, thinking, size):
    reply = parse_ids(ids, small_bpe, thinking=thinking)
    parser = IdParser(small_bpe, thinking=thinking)
    deltas = deltas_of(parser, [ids[at : at + size] for at in range(0, len(ids), size)])
    assert parser.finish() == reply
    assert_adds_up(deltas, reply)
    assert join_calls(deltas) == parts_of(IdParser(small_bpe, thinking=thinking), ids)


plain = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
plain |= st.lists(st.sampled_from([*MARKERS, "think", " tool=", "&", '"']), max_size=4).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner | plain, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150)
@given(
    reasoning=plain,
    content=plain,
    arguments=st.lists(st.dictionaries(plain, plain | values, max_size=3), max_size=3),
    name=plain.filter(bool),
)
def test_what_is_rendered_is_parsed_and_renders_again(
    small_bpe, reasoning, content, arguments, name
):
    found = [
        {"id": str(place), "function": {"name": name, "arguments": json.dumps(argument)}}
        for place, argument in enumerate(arguments)
    ]
    message = {"role": "assistant", "reasoning": reasoning, "content": content, "tool_calls": found}
    segments = render([message], add_generation_prompt=False)
    reply = parse_ids(small_bpe.encode_segments(segments), small_bpe)
    assert (reply.reasoning, reply.content) == (reasoning or None, content or None)
    assert [json.loads(call.arguments) for call in reply.tool_calls] == arguments
    assert [call.name for call in reply.tool_calls] == [name] * len(arguments)
    assert reply.is_complete and reply.problems == ()
    again = reply.message([str(place) for place in range(len(arguments))])
    assert render([again], add_generation_prompt=False) == segments
