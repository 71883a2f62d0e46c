"""A conversation in the terminal, through XTML, printed as it comes."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from baltoro.model.model import Model
from baltoro.serve.generate import (
    Dtype,
    described,
    generate_tokens,
    image_features,
    load_for_text,
    seeded,
    speed_line,
)
from baltoro.serve.sampler import Sampling
from baltoro.text.channels import IdParser
from baltoro.text.processor import Processor
from baltoro.text.reply import Delta, Reply

Effort = Literal["low", "high", "max"]
EFFORTS = ("low", "high", "max")

HELP = """\
/image PATH    put a picture into the next message
/effort LEVEL  low, high, max, or none for no effort message
/undo          take back the last question and its answer
/reset         forget the conversation
/exit          leave (so does Ctrl-D); Ctrl-C stops an answer\
"""


class Conversation:
    """The messages so far and how the next answer is drawn."""

    def __init__(
        self,
        model: Model,
        *,
        system: str | None,
        thinking: bool,
        effort: Effort | None,
        sampling: Sampling,
        max_new_tokens: int,
        seed: int | None,
    ) -> None:
        self.model = model
        self.processor: Processor = model.processor
        self.thinking = thinking
        self.effort = effort
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.generator = seeded(seed, str(model.lm_head.weight.device))
        self.head = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = list(self.head)
        self.pictures: list[Path] = []
        self.speed = ""

    def reset(self) -> None:
        """Back to the system message alone."""
        self.messages = list(self.head)
        self.pictures = []

    def undo(self) -> bool:
        """Drop everything from the last question on; whether there was one."""
        for place in reversed(range(len(self.messages))):
            if self.messages[place]["role"] == "user":
                del self.messages[place:]
                return True
        return False

    def ask(self, text: str) -> Iterator[Delta]:
        """Add a question and yield the answer as it comes; both stay in the conversation.

        An answer cut short by closing the iterator stays as far as it came. Raises `ValueError`,
        leaving the conversation as it was, if the prompt cannot be made or does not fit.
        """
        content: Any = text
        if self.pictures:
            parts = [{"type": "image", "image": path} for path in self.pictures]
            content = [*parts, {"type": "text", "text": text}]
        question = {"role": "user", "content": content}
        prompt = self.processor.prompt(
            [*self.messages, question], thinking=self.thinking, thinking_effort=self.effort
        )
        tokens = generate_tokens(
            self.model,
            prompt.ids,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            stop_ids=self.processor.tokenizer.stop_ids,
            generator=self.generator,
            image_features=image_features(self.model, prompt),
        )
        self.messages.append(question)
        self.pictures = []
        parser = IdParser(self.processor.tokenizer, thinking=self.thinking, tools_declared=False)
        start, first, count = time.perf_counter(), 0.0, 0
        try:
            for token in tokens:
                count += 1
                first = first or time.perf_counter() - start
                yield parser.feed([token.id])
        finally:
            reply = parser.finish()
            self.messages.append(Reply(reply.reasoning, reply.content).message())
            total = time.perf_counter() - start
            self.speed = speed_line(len(prompt.ids), count, first, total)
        for call in reply.undeclared_calls:
            shown = json.dumps({"name": call.name, "arguments": call.arguments})
            yield Delta(content=f"\n[asked for a tool that was not offered: {shown}]")


def chat(
    checkpoint: str,
    *,
    system: str | None = None,
    thinking: bool = True,
    effort: Effort | None = "max",
    max_new_tokens: int = 1024,
    temperature: float = 1.0,
    top_p: float = 0.95,
    seed: int | None = None,
    dtype: Dtype | None = None,
    device: str = "cpu",
    experts: Literal["decoded", "packed"] = "decoded",
) -> None:
    """Talk with the model in CHECKPOINT.

    Thinking is dimmed. Lines starting with / are commands; /help lists them. Questions can also be
    piped in, one per line.

    Args:
        checkpoint: directory in the official layout, with its tokenizer.
        system: system message at the head of the conversation.
        thinking: let the model think before it answers.
        effort: how much it is told to think.
        max_new_tokens: longest answer, thinking included.
        temperature: 0 always takes the likeliest token.
        top_p: draw from the smallest set of tokens with this probability.
        seed: equal seeds give equal conversations on one machine.
        dtype: of the weights; absent, bfloat16 on a GPU and as they are stored on a CPU.
        device: cpu, cuda, cuda:1.
        experts: keep MXFP4 experts packed to save memory.
    """
    sampling = Sampling(temperature=temperature, top_p=top_p)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: must be at least 1")
    model = load_for_text(checkpoint, dtype=dtype, device=device, experts=experts)
    if sys.stdin.isatty():
        print(f"[{described(model)}]", file=sys.stderr)
    conversation = Conversation(
        model,
        system=system,
        thinking=thinking,
        effort=effort,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    run(conversation, Console(highlight=False))


def run(conversation: Conversation, console: Console) -> None:
    """Read questions and commands until the input ends."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        console.print("Type a question, or /help.", style="dim")
    while True:
        try:
            line = console.input("> " if is_terminal else "").strip()
        except EOFError:
            return
        if line == "/exit":
            return
        try:
            if line.startswith("/"):
                console.print(Text(_command(conversation, line), style="dim"))
            elif line:
                _answer(conversation, line, console)
        except ValueError as error:
            # one bad question does not end a conversation that somebody types
            if not is_terminal:
                raise
            console.print(Text(str(error), style="red"))


def _answer(conversation: Conversation, line: str, console: Console) -> None:
    deltas = conversation.ask(line)
    try:
        for delta in deltas:
            if delta.retracts_reasoning:
                console.print()
            console.print(Text(delta.reasoning, style="dim italic"), end="", soft_wrap=True)
            console.print(Text(delta.content), end="", soft_wrap=True)
    except KeyboardInterrupt:
        deltas.close()  # type: ignore[attr-defined]
    console.print()
    if console.is_terminal:
        console.print(Text(conversation.speed, style="dim"))


def _command(conversation: Conversation, line: str) -> str:
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name == "/help":
        return HELP
    if name == "/reset":
        conversation.reset()
        return "conversation forgotten"
    if name == "/undo":
        return "question taken back" if conversation.undo() else "nothing to take back"
    if name == "/effort":
        if argument not in (*EFFORTS, "none"):
            raise ValueError(f"/effort {argument}: use low, high, max or none")
        conversation.effort = None if argument == "none" else argument  # type: ignore[assignment]
        return f"effort: {argument}"
    if name == "/image":
        path = Path(argument).expanduser()
        if not path.is_file():
            raise ValueError(f"/image {argument}: no such file")
        conversation.pictures.append(path)
        return f"{len(conversation.pictures)} pictures wait for the next message"
    raise ValueError(f"{name}: unknown command; /help lists them")
