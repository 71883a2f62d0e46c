"""Judges an answer in a file. Standard library only; runs inside a sandbox and outside.

answer.py RESULT EXPECTED    EXPECTED is JSON with "answer" and "mode". Mode "same": write 1 if
                             answer.txt says the same. Mode "other": write 1 if it says something
                             else and quote.txt holds a passage of a file below corpus/, word
                             for word.
"""

import json
import math
import os
import re
import sys

MIN_QUOTE_CHARS = 20
MAX_ANSWER_BYTES = 10000


def same_answer(one: str, other: str) -> bool:
    """Whether two answers say the same: numbers by value, other text by its words."""
    first, second = number(one), number(other)
    if first is not None and second is not None:
        return math.isclose(first, second, rel_tol=1e-6, abs_tol=1e-12)
    return words(one) == words(other)


def number(text: str) -> float | None:
    """The number that a text is, thousands separated or not; None if it is none."""
    plain = text.strip().rstrip(".").replace(",", "")
    if not re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", plain):
        return None
    return float(plain)


def words(text: str) -> list[str]:
    """Words in small letters, articles left out."""
    found = re.findall(r"\w+", text.casefold())
    return [word for word in found if word not in ("a", "an", "the")]


def read(path: str) -> str:
    """A file's text; nothing if there is none."""
    try:
        with open(path, "rb") as source:
            return source.read(MAX_ANSWER_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def is_in_corpus(quote: str) -> bool:
    """Whether a passage stands in a file below corpus/."""
    squeezed = " ".join(quote.split())
    if len(squeezed) < MIN_QUOTE_CHARS:
        return False
    for folder, _, names in os.walk("corpus"):
        for name in names:
            with open(os.path.join(folder, name), "rb") as source:
                text = source.read().decode("utf-8", "replace")
            if squeezed in " ".join(text.split()):
                return True
    return False


def main(result: str, expected_path: str) -> None:
    """Judge the files in the working folder."""
    with open(expected_path) as source:
        expected = json.load(source)
    answer = read("answer.txt")
    is_same = bool(answer.strip()) and same_answer(answer, expected["answer"])
    if expected["mode"] == "same":
        score = is_same
    else:
        score = bool(words(answer)) and not is_same and is_in_corpus(read("quote.txt"))
    print("answer:", answer[:200])
    with open(result, "w") as target:
        target.write(str(int(score)))


if __name__ == "__main__":
    main(*sys.argv[1:])
