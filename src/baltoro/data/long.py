"""Long-context synthesis: whole documents in a new order, with tasks spread over the window.

Report, section 3.4: documents are permuted and concatenated, and the tasks embedded between them
need what is scattered over the entire window. The window is divided into as many parts as a task
has entries, and each part holds one, at a break between paragraphs; the questions and their worked
answers stand at the end. Conversations are not used.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from baltoro.data.config import LongConfig
from baltoro.data.document import Document

_NAMES = (
    *("Ada", "Bela", "Chen", "Dina", "Emil", "Fara", "Goran", "Hana"),
    *("Ines", "Jonas", "Kofi", "Lena", "Mila", "Nuri", "Olga", "Pavel"),
)
_PLACES = (
    *("the harbour", "the mill", "the old bridge", "the market", "the chapel", "the quarry"),
    *("the orchard", "the tower", "the ferry", "the well", "the granary", "the lighthouse"),
    *("the smithy", "the library"),
)
_COLOURS = (
    *("red", "blue", "green", "white", "black", "yellow"),
    *("silver", "copper", "violet", "orange", "brown", "grey"),
)

# (entries in the order of the window, question, answer)
Task = tuple[list[str], str, str]


def windows(documents: Sequence[Document], config: LongConfig, seed: int) -> Iterator[Document]:
    """`num_windows` documents, from the ones given; none is used twice in one window.

    Raises `ValueError` if there is nothing to concatenate.
    """
    usable = [
        document
        for document in documents
        if not document.messages and (config.takes_pictures or not document.pictures)
    ]
    if not usable:
        raise ValueError("long: no document can be concatenated; add text sources or set long=None")
    for number in range(config.num_windows):
        rng = random.Random(f"{seed}/long/{number}")
        yield _window(usable, config, rng, f"window {number}")


def _window(
    documents: Sequence[Document], config: LongConfig, rng: random.Random, name: str
) -> Document:
    blocks = _blocks(documents, config.num_characters, rng)
    code = f"{rng.choice('BDGKMRTV')}{rng.randrange(100, 1000)}"
    tasks = [make(config.num_entries, code, rng) for make in (_ledger, _trail, _bells)]
    for entries, _, _ in tasks:
        _spread(blocks, entries, rng)
    rng.shuffle(tasks)
    questions = [f"Question: {question}\nAnswer: {answer}" for _, question, answer in tasks]
    return Document(name, tuple(_merged([*blocks, "\n\n".join(questions) + "\n"])))


def _blocks(
    documents: Sequence[Document], num_characters: int, rng: random.Random
) -> list[str | bytes]:
    """Paragraphs and pictures of documents in random order, until there are enough characters."""
    blocks: list[str | bytes] = []
    size = 0
    for index in rng.sample(range(len(documents)), len(documents)):
        for part in documents[index].parts:
            if isinstance(part, bytes):
                blocks.append(part)
                continue
            size += len(part)
            blocks += [paragraph for paragraph in part.split("\n\n") if paragraph.strip()]
        if size >= num_characters:
            break
    return blocks


def _spread(blocks: list[str | bytes], entries: Sequence[str], rng: random.Random) -> None:
    """Insert entry i at a random break of the i-th of equal parts, measured in characters."""
    stops = []
    total = 0
    for block in blocks:
        total += len(block) if isinstance(block, str) else 0
        stops.append(total)
    places = []
    for index in range(len(entries)):
        point = (index + rng.random()) / len(entries) * total
        places.append(sum(stop <= point for stop in stops))
    for place, entry in reversed(list(zip(places, entries, strict=True))):
        blocks.insert(place, entry)


def _merged(blocks: Sequence[str | bytes]) -> Iterator[str | bytes]:
    text = ""
    for block in blocks:
        if isinstance(block, str):
            text += block.strip("\n") + "\n\n"
        else:
            if text:
                yield text
            yield block
            text = ""
    yield text.rstrip("\n") + "\n"


def _ledger(num_entries: int, code: str, rng: random.Random) -> Task:
    names = [rng.choice(_NAMES) for _ in range(num_entries)]
    sums = [rng.randrange(3, 98) for _ in range(num_entries)]
    entries = [
        f"(Ledger {code}: {name} paid {amount} crowns.)"
        for name, amount in zip(names, sums, strict=True)
    ]
    return (
        entries,
        f"How many crowns does ledger {code} record in all?",
        f"The entries are {', '.join(map(str, sums))}, in all {sum(sums)}.",
    )


def _trail(num_entries: int, code: str, rng: random.Random) -> Task:
    count = min(num_entries + 1, len(_PLACES))
    places = rng.sample(_PLACES, count)
    steps = list(pairwise(places))
    entries = [f"(Trail {code}: from {start} it goes on to {end}.)" for start, end in steps]
    rng.shuffle(entries)
    return (
        entries,
        f"Trail {code} begins at {places[0]}. Where does it end?",
        f"It goes {', '.join(f'from {start} to {end}' for start, end in steps)}; it ends at "
        f"{places[-1]}.",
    )


def _bells(num_entries: int, code: str, rng: random.Random) -> Task:
    colours = rng.sample(_COLOURS, min(num_entries, len(_COLOURS)))
    return (
        [f"(Bells {code}: the {colour} bell rang.)" for colour in colours],
        f"In which order did the bells of {code} ring?",
        f"{', '.join(colours)}.",
    )
