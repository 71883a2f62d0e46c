"""Forms of replies compiled over our vocabulary: which tokens may come next, by llguidance.

The extra `serve` has it. It brings nothing else along; xgrammar, its better-known kin, installs
transformers and triton, and passes over keywords of a schema that it does not know.
"""

import re
import threading
from collections import OrderedDict

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from torch import Tensor

from baltoro.serve.form import Form, FormError
from baltoro.text.vocabulary import Tokenizer

MAX_COMPILED = 128  # grammars that are kept
MAX_LENGTH = 1 << 20  # characters of a grammar
# Room for objects of some thousands of optional members; llguidance's own stop at 500.
LIMITS = LLParserLimits(max_items_in_row=20_000, step_max_items=200_000)


class Grammars:
    """Compiles forms, each once as long as it is among the last `MAX_COMPILED` ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.num_compiled = 0
        self._vocabulary = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)))
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, form: Form) -> "CompiledGrammar":
        """The grammar of a form. Raises `FormError` naming the field and what is wrong in it."""
        lark = form.lark()
        with self._lock:
            if lark in self._compiled:
                self._compiled.move_to_end(lark)
                return self._compiled[lark]
        matcher, fault = self._matcher(lark)
        if fault:
            for field, part in form.parts():
                _, reason = self._matcher(part.lark())
                if reason:
                    raise FormError(field, reason)
            raise FormError("tools" if form.tools else "response_format", fault)
        grammar = CompiledGrammar(matcher, self._vocabulary.eos_token)
        with self._lock:
            self.num_compiled += 1
            self._compiled[lark] = grammar
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return grammar

    def _matcher(self, lark: str) -> tuple[LLMatcher, str]:
        """A matcher at its start, and what keeps it from working, if anything."""
        if len(lark) > MAX_LENGTH:
            lark, fault = "start: ", f"is too large, with a grammar of {len(lark)} characters"
        else:
            fault = ""
        grammar = LLMatcher.grammar_from_lark(lark)
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=LIMITS)
        if not fault and matcher.is_error():
            fault = _reason(matcher.get_error())
        return matcher, fault


class CompiledGrammar:
    """A `baltoro.serve.request.Grammar`."""

    def __init__(self, matcher: LLMatcher, end_id: int) -> None:
        self._matcher = matcher
        self._end_id = end_id

    def start(self) -> "Matcher":
        """The constraint of a new reply."""
        return Matcher(self._matcher.deep_copy(), self._end_id)


class Matcher:
    """A `baltoro.serve.request.Constraint`."""

    def __init__(self, matcher: LLMatcher, end_id: int) -> None:
        self._matcher = matcher
        self._end_id = end_id
        self._is_over = False
        self._allowed: np.ndarray | None = None  # bool [W] for the next token; None: not computed

    def mask(self, logits_W: Tensor) -> bool:
        """Exclude in place what may not come next; False if nothing may."""
        allowed = self._next()
        num_missing = len(logits_W) - len(allowed)
        if num_missing > 0:
            allowed = np.pad(allowed, (0, num_missing))
        excluded_W = torch.from_numpy(~allowed[: len(logits_W)]).to(logits_W.device)
        logits_W.masked_fill_(excluded_W, -torch.inf)
        return bool(allowed.any())

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, and nothing changes, if it may not come next."""
        if not self._next()[token_id]:
            return False
        self._allowed = None
        # llguidance takes the end as well, but does not count it when tokens are taken back
        self._is_over = token_id == self._end_id
        return self._is_over or self._matcher.consume_token(token_id)

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        if count:
            self._matcher.rollback(count - self._is_over)
            self._is_over = False
            self._allowed = None

    def is_free(self, count: int) -> bool:
        """Whether the next `count` tokens may be any: never certain."""
        return False

    def _next(self) -> np.ndarray:
        if self._allowed is None:
            data = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(data, bitorder="little")
            is_stuck = self._is_over or self._matcher.is_error()
            self._allowed = np.zeros_like(bits, bool) if is_stuck else bits > 0
        return self._allowed


class _Vocabulary:
    """A tokenizer as llguidance asks for one. Its end is the end of a message."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = tokenizer.stop_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(n) for n in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids.values())
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.encode(text)


def _reason(message: str) -> str:
    """What llguidance says without the place, which the client did not write."""
    text = re.sub(r"^at \d+\(\d+\): |\n\s+\d+ \|.*", "", message, flags=re.DOTALL)
    return " ".join(text.removeprefix("failed to compile JSON schema: ").split())
