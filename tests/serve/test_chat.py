import io
from collections.abc import Iterable
from pathlib import Path

import pytest
from PIL import Image

from baltoro.cli import main
from baltoro.model.model import Model
from baltoro.serve import chat
from baltoro.serve.chat import Conversation
from baltoro.serve.generate import GeneratedToken
from baltoro.serve.sampler import Sampling

ANSWER = (
    "why<|close|>think<|sep|><|open|>response<|sep|>because"
    "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
)


@pytest.fixture
def conversation(nano: Model) -> Conversation:
    return Conversation(
        nano,
        system="Be brief.",
        thinking=True,
        effort=None,
        sampling=Sampling(temperature=0.0),
        max_new_tokens=6,
        seed=None,
    )


def answer_with(monkeypatch: pytest.MonkeyPatch, model: Model, text: str) -> list[list[int]]:
    """Let the model say `text`; returns the prompts it is given."""
    prompts: list[list[int]] = []

    def fake(_: Model, prompt_ids: list[int], **__: object) -> Iterable[GeneratedToken]:
        prompts.append(prompt_ids)
        return iter([GeneratedToken(i, 0.0) for i in model.tokenizer.encode(text, True)])

    monkeypatch.setattr(chat, "generate_tokens", fake)
    return prompts


def test_an_answer_is_parsed_into_its_channels_and_kept(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = answer_with(monkeypatch, conversation.model, ANSWER)
    deltas = list(conversation.ask("Why?"))
    assert "".join(d.reasoning for d in deltas) == "why"
    assert "".join(d.content for d in deltas) == "because"
    assert conversation.messages[1:] == [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "because", "reasoning_content": "why"},
    ]
    list(conversation.ask("And?"))
    second = conversation.model.tokenizer.decode(prompts[1])
    assert "why<|close|>think" in second and second.index("because") < second.index("And?")


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, conversation.model, ANSWER)
    deltas = conversation.ask("Why?")
    next(deltas)
    deltas.close()  # type: ignore[attr-defined]
    assert conversation.messages[-1] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "w",
    }


def test_a_call_of_a_tool_nobody_offered_is_shown_and_not_run(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        '<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="rm" index="1"<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    answer_with(monkeypatch, conversation.model, text)
    shown = "".join(d.content for d in conversation.ask("Clean up"))
    assert "asked for a tool that was not offered" in shown and '"rm"' in shown
    assert "tool_calls" not in conversation.messages[-1]


def test_undo_and_reset_take_messages_back(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, conversation.model, ANSWER)
    list(conversation.ask("one"))
    list(conversation.ask("two"))
    assert conversation.undo()
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant"]
    conversation.reset()
    assert [m["role"] for m in conversation.messages] == ["system"]
    assert not conversation.undo()


def test_a_question_that_does_not_fit_leaves_the_conversation_as_it_was(
    conversation: Conversation,
) -> None:
    conversation.max_new_tokens = 10**9
    with pytest.raises(ValueError, match="exceed the context"):
        list(conversation.ask("Why?"))
    assert [m["role"] for m in conversation.messages] == ["system"]


def test_a_waiting_picture_goes_into_the_next_question(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Image.new("RGB", (56, 28)).save(tmp_path / "p.png")
    prompts = answer_with(monkeypatch, conversation.model, ANSWER)
    conversation.pictures = [tmp_path / "p.png"]
    list(conversation.ask("What?"))
    assert prompts[0].count(conversation.model.tokenizer.media_pad_id) == 2
    assert conversation.pictures == []


def test_questions_can_be_piped_in(
    nano_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/help\nhello\n/undo\n/effort low\n/exit\nno\n"))
    assert main(["chat", str(nano_dir), "--max-new-tokens", "4", "--seed", "0"]) == 0
    out = capsys.readouterr().out
    assert "/image PATH" in out and "question taken back" in out and "effort: low" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/effort medium", "use low, high, max or none"),
        ("/image nowhere.png", "no such file"),
        ("/frobnicate", "unknown command"),
    ],
)
def test_a_wrong_command_is_named(
    nano_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    message: str,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(line + "\n"))
    assert main(["chat", str(nano_dir)]) == 2
    assert message in capsys.readouterr().err
