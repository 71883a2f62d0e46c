"""Which documents are worth reading: rules that name their reason, and a score.

The rules are those that web corpora are known to need (lengths, symbols, repetition), and the
structural ones of the report, section 3.4: binary, truncated, machine logs.
"""

import re
import zlib
from collections import Counter

from baltoro.data.config import FilterConfig, Rules

_UNREADABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\ufffd]")
_SYMBOL = re.compile(r"[^\w\s]")
_LETTER = re.compile(r"[^\W\d_]")
_SAMPLE = 50_000  # characters from which shares and scores are taken
_FENCE = re.compile(r"^ *```", re.MULTILINE)
_WORD = re.compile(r"[^\W_]+")
_LOG_LINE = re.compile(
    r"^\W*(\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d|\d\d:\d\d:\d\d|\w{3} +\d+ \d\d:\d\d:\d\d"
    r"|(DEBUG|INFO|WARN(ING)?|ERROR|TRACE)\b|0x[0-9a-f]{6,}|\[ *\d+\.\d+\])"
)
_COMMON_WORDS = (
    "the of and to a in is that for it as with be by on not this are or an from at which if but "
    "you can will has have was when all one no its we der die und das ist de la el le les que en "
    "un una est"
)
_COMMON = frozenset(_COMMON_WORDS.split())
_CLOSER = {"(": ")", "[": "]", "{": "}"}


def fault(text: str, rules: Rules, config: FilterConfig) -> str | None:
    """Why a text is left out, in a word or two, or None."""
    if len(text) > config.max_characters:
        return "too long"
    if len(text.strip()) < (1 if rules == "short" else config.min_characters):
        return "too short"
    if len(_UNREADABLE.findall(text)) > config.max_unreadable_share * len(text):
        return "binary"
    if rules == "short":
        return None
    lines = text.splitlines()
    if max(map(len, lines)) > config.max_line:
        return "long lines"
    if sum(map(bool, map(_LOG_LINE.match, lines))) > config.max_log_line_share * len(lines):
        return "log"
    head = text[:_SAMPLE]
    symbol_share = len(_SYMBOL.findall(head)) / len(head)
    limit = config.max_symbol_share if rules == "prose" else config.max_code_symbol_share
    if symbol_share > limit:
        return "symbols"
    if rules == "prose" and _letter_share(head) < config.min_letter_share:
        return "few letters"
    if is_truncated(text):
        return "truncated"
    return _repetition(text, lines, rules, config)


def quality(text: str, rules: Rules) -> float:
    """A score from 0 to 1, the mean of whole sentences, common words and plausible density."""
    words = _WORD.findall(text[:_SAMPLE].lower())
    if not words or rules == "short":
        return 0.5 if words else 0.0
    data = text[:_SAMPLE].encode(errors="replace")
    ratio = len(zlib.compress(data, 1)) / len(data)
    # Plain text shrinks to 0.3 to 0.6 of its size; tables of numbers less, echoes more.
    density = max(0.0, 1.0 - abs(ratio - 0.45) / 0.35)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    mean_line = sum(map(len, lines)) / len(lines)
    shape = min(1.0, mean_line / (40.0 if rules == "prose" else 20.0))
    if rules == "code":
        has_comments = any(mark in text for mark in ("#", "//", "/*", '"""', "--", ";;"))
        return (density + shape + has_comments) / 3
    common = min(1.0, sum(word in _COMMON for word in words) / len(words) / 0.3)
    ends = sum(line[-1] in ".!?:;,)\"'”»" for line in lines) / len(lines)
    return (density + shape + common + min(1.0, ends / 0.5)) / 4


def is_truncated(text: str) -> bool:
    """Whether a text stops in the middle: no end of a line, and something still open."""
    if text.endswith("\n") or text.rstrip().endswith((".", "!", "?", "```", "}", ")", "]")):
        return len(_FENCE.findall(text)) % 2 == 1
    tail = text[-20_000:]
    open_brackets = any(
        tail.count(opener) > tail.count(closer) for opener, closer in _CLOSER.items()
    )
    return open_brackets or len(_FENCE.findall(text)) % 2 == 1


def _letter_share(text: str) -> float:
    return len(_LETTER.findall(text)) / max(1, len(text) - sum(map(str.isspace, text)))


def _repetition(text: str, lines: list[str], rules: Rules, config: FilterConfig) -> str | None:
    seen: set[str] = set()
    repeated = 0
    for line in map(str.strip, lines):
        # Short lines, such as closing brackets, recur in any code.
        if line in seen and len(line) > 12:
            repeated += len(line)
        seen.add(line)
    if repeated > config.max_duplicate_line_share * len(text):
        return "repetition"
    words = _WORD.findall(text)
    if rules == "code" or len(words) < 40:
        return None
    ngrams = Counter(zip(words, words[1:], words[2:], words[3:], strict=False))
    _, count = ngrams.most_common(1)[0]
    return "repetition" if 4 * count > config.max_ngram_share * len(words) and count > 3 else None
