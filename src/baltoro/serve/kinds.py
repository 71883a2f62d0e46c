"""The two kinds of completion: the reply to a conversation, the continuation of a text."""

from baltoro.serve.answer import (
    Answer,
    ChatReader,
    TextReader,
    chat_delta,
    chat_message,
    text_logprobs,
)
from baltoro.serve.choices import Choices, JsonDict, Reader
from baltoro.serve.protocol import ChatBody, CompletionBody
from baltoro.serve.thinking import ThinkingCap
from baltoro.text.processor import Prompt
from baltoro.text.reply import Delta


class ChatChoices(Choices):
    """`POST /v1/chat/completions`."""

    kind, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body: ChatBody

    def prompts(self) -> list[Prompt]:
        body = self.body
        form = body.form()
        if form is not None:
            self._grammar = self._grammars.compile(form)
        limit = self._config.max_thinking.get(body.effort)
        if limit is not None:
            self._grammar = ThinkingCap(self.processor.tokenizer, limit, self._grammar)
        prompt = self.processor.prompt(
            body.messages,
            body.tools,
            thinking=body.thinking,
            thinking_effort=body.effort if body.thinking else None,
            tool_choice=body.tool_choice,
            response_format=body.response_format,
            max_tokens=self._background.engine.model.config.max_seq_len - 1,
        )
        return [prompt]

    def reader(self) -> Reader:
        has_tools = bool(self.body.tools) and self.body.tool_choice != "none"
        return ChatReader(
            self.processor.tokenizer,
            thinking=self.body.thinking,
            has_tools=has_tools,
            stop=self.body.stop_strings,
        )

    def num_logprobs(self) -> int | None:
        return (self.body.top_logprobs or 0) if self.body.logprobs else None

    def first_parts(self) -> list[JsonDict]:
        return [{"delta": {"role": "assistant", "content": ""}}]

    def part(self, index: int, delta: Delta, logprob: JsonDict | None) -> JsonDict:
        fields = chat_delta(delta, self._call_ids[index])
        if logprob is not None:
            return {"delta": fields, "logprobs": {"content": [logprob]}}
        return {"delta": fields} if fields else {}

    def last_part(self) -> JsonDict:
        return {"delta": {}}

    def choice(self, index: int, answer: Answer) -> JsonDict:
        logprobs = {"content": self._logprobs[index]} if self.body.logprobs else None
        return {"message": chat_message(answer, self._call_ids[index]), "logprobs": logprobs}


class TextChoices(Choices):
    """`POST /v1/completions`."""

    kind, object, chunk_object = "cmpl", "text_completion", "text_completion"
    body: CompletionBody

    def prompts(self) -> list[Prompt]:
        encode = self.processor.tokenizer.encode
        return [Prompt(encode(p) if isinstance(p, str) else p) for p in self.body.prompts]

    def reader(self) -> Reader:
        return TextReader(self.processor.tokenizer, self.body.stop_strings)

    def num_logprobs(self) -> int | None:
        return self.body.logprobs

    def first_parts(self) -> list[JsonDict]:
        return []

    def part(self, index: int, delta: Delta, logprob: JsonDict | None) -> JsonDict:
        if logprob is not None:
            return {"text": delta.content, "logprobs": text_logprobs([logprob])}
        return {"text": delta.content, "logprobs": None} if delta.content else {}

    def last_part(self) -> JsonDict:
        return {"text": "", "logprobs": None}

    def choice(self, index: int, answer: Answer) -> JsonDict:
        has_logprobs = self.body.logprobs is not None
        logprobs = text_logprobs(self._logprobs[index]) if has_logprobs else None
        return {"text": answer.content, "logprobs": logprobs}
