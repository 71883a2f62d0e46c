"""What the build makes itself: right answers, readable pictures, evidence across a window."""

import io
import itertools
import random
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from data.small import prose
from PIL import Image

from baltoro.data import drawn, exercises
from baltoro.data.config import LongConfig, MadeConfig, RephraseConfig
from baltoro.data.document import Document, data_url
from baltoro.data.images import encode, png, shrink
from baltoro.data.long import windows
from baltoro.data.rephrase import passages, recall, rephrasings
from baltoro.text.images import ImageProcessor
from baltoro.text.processor import Processor
from baltoro.text.tokenizer import train

IMAGES = ImageProcessor()


def made(kind: str, count: int = 60) -> list[Document]:
    source = MadeConfig(name="s", domain="d", kind=kind, num_documents=count)  # type: ignore[arg-type]
    module = exercises if kind == "exercises" else drawn
    return list(module.documents(source, seed=4))


@pytest.fixture(scope="module")
def processor() -> Processor:
    return Processor(train([prose(1)], 300, 16), IMAGES)


@pytest.mark.parametrize("kind", ["exercises", "rendered_text", "chart", "shapes"])
def test_documents_are_a_function_of_seed_and_number(kind):
    first = made(kind, 20)
    assert [document.hash for document in made(kind, 30)[:20]] == [item.hash for item in first]
    assert len({document.hash for document in first}) > 15


def test_sums_are_right():
    for number in range(50):
        question, answer = exercises.addition(random.Random(number))
        a, b = map(int, re.findall(r"\d+", question))
        assert answer.endswith(f"= {a + b}.")
        question, answer = exercises.multiplication(random.Random(number))
        a, b = map(int, re.findall(r"\d+", question))
        assert answer.endswith(f"together {a * b}.")


def test_programs_print_what_the_answer_says(capsys):
    for number in range(30):
        question, answer = exercises.loop_program(random.Random(number))
        exec(question.partition("```python\n")[2].removesuffix("\n```"))
        assert answer == f"It prints {', '.join(capsys.readouterr().out.split())}."


def test_expressions_have_the_value_that_the_answer_says():
    for number in range(40):
        question, answer = exercises.text_program(random.Random(number))
        match = re.fullmatch(r"With word = (.*) and other = (.*), what is (.*)\?", question)
        assert match
        word, other = match[1].strip("'"), match[2].strip("'")
        assert answer == repr(eval(match[3], {"word": word, "other": other}))


def test_fractions_are_in_lowest_terms():
    for number in range(60):
        question, answer = exercises.fraction(random.Random(number))
        a, b, c, d = map(int, re.findall(r"\d+", question))
        top, bottom = map(int, re.findall(r"(\d+)/(\d+)", answer)[-1])
        assert top * b * d == bottom * (a * d + c * b)
        assert np.gcd(top, bottom) == 1 or "which is" in answer


def test_all_kinds_of_exercises_occur_in_both_forms():
    documents = made("exercises", 90)
    titles = {document.text.partition("\n")[0] for document in documents if not document.messages}
    assert len(titles) > 10
    assert sum(bool(document.messages) for document in documents) > 20


def test_rendered_text_is_in_the_picture():
    for document in made("rendered_text", 20):
        image = np.asarray(Image.open(io.BytesIO(document.pictures[0])).convert("L"))
        assert np.ptp(image) > 100
        assert 12 < image.shape[0] < 120 and image.shape[1] < 300


def test_coordinates_are_given_in_pixels_and_as_shares():
    found = 0
    for document in made("shapes", 40):
        width, height = Image.open(io.BytesIO(document.pictures[0])).size
        for x, y, u, v in re.findall(
            r"at \((\d+), (\d+)\), that is \((0\.\d+), (0\.\d+)\)", document.text
        ):
            assert float(u) == pytest.approx(int(x) / width, abs=0.006)
            assert float(v) == pytest.approx(int(y) / height, abs=0.006)
            found += 1
    assert found > 30


def test_the_svg_says_what_is_drawn():
    for document in made("shapes", 40):
        image = Image.open(io.BytesIO(document.pictures[0])).convert("RGB")
        elements = re.findall(r'<circle cx="(\d+)" cy="(\d+)" r="\d+" fill="(\w+)"', document.text)
        last = document.text.rpartition("<")[0].rpartition("\n<")[2]
        for x, y, colour in elements[-1:]:
            if f'cx="{x}" cy="{y}"' in last:
                assert image.getpixel((int(x), int(y))) == _rgb(drawn._COLOURS[colour])


def _rgb(value: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(value.removeprefix("#")))


def test_the_numbers_of_a_chart_sum_up():
    for document in made("chart", 40):
        match = re.search(r"The sum is (\d+)\.", document.text)
        if match:
            values = re.findall(r"^\w+,(\d+)$", document.text, re.MULTILINE)
            assert sum(map(int, values)) == int(match[1])


def test_long_windows_spread_their_evidence_over_the_whole_window():
    config = LongConfig(num_windows=6, num_characters=12_000, num_entries=5)
    for window in windows([Document(str(i), (prose(i),)) for i in range(40)], config, seed=1):
        text = window.text
        body = text.index("Question: ")
        for kind in ("Ledger", "Trail", "Bells"):
            places = [match.start() / body for match in re.finditer(rf"\({kind} ", text[:body])]
            assert len(places) == 5
            for index, place in enumerate(places):
                assert index / 5 - 0.1 < place < (index + 1) / 5 + 0.1


def test_long_windows_answer_from_their_evidence():
    config = LongConfig(num_windows=6, num_characters=6_000, num_entries=4)
    for window in windows([Document(str(i), (prose(i),)) for i in range(20)], config, seed=2):
        text = window.text
        paid = [int(amount) for amount in re.findall(r"paid (\d+) crowns\.\)", text)]
        assert f"in all {sum(paid)}." in text
        steps = dict(re.findall(r"from (the [a-z ]+) it goes on to (the [a-z ]+)\.\)", text))
        (place,) = re.findall(r"begins at (the [a-z ]+)\.", text)
        for _ in range(4):
            place = steps[place]
        assert text.count(f"it ends at {place}.") == 1
        bells = re.findall(r"the (\w+) bell rang", text)
        assert f"Answer: {', '.join(bells)}." in text


def test_long_windows_permute_whole_documents():
    documents = [Document(str(i), (prose(i),)) for i in range(10)]
    config = LongConfig(num_windows=2, num_characters=10**6, num_entries=3)
    first, second = windows(documents, config, seed=1)
    orders = []
    for window in (first, second):
        places = [window.text.index(prose(i)[:40]) for i in range(10)]
        orders.append(np.argsort(places).tolist())
    assert orders[0] != orders[1]


def test_long_windows_hold_pictures_only_if_asked():
    picture = png(Image.new("RGB", (30, 30)))
    documents = [Document("a", (picture, "A black square\n")), Document("b", (prose(1),))]
    config = LongConfig(num_windows=1, num_characters=10**4, num_entries=2)
    (window,) = windows(documents, config, seed=1)
    assert not window.pictures and "black square" not in window.text
    (window,) = windows(documents, replace(config, takes_pictures=True), seed=1)
    assert window.pictures == (picture,)
    place = window.parts.index(picture)
    assert "A black square" in str(window.parts[place + 1])


def test_long_windows_need_documents():
    config = LongConfig(num_windows=1, num_characters=10)
    with pytest.raises(ValueError, match="no document can be concatenated"):
        list(windows([Document("a", messages=({"role": "user", "content": "x"},))], config, 0))


REPHRASE = RephraseConfig(domains=("d",), styles=("plain", "brief"), chunk_characters=100)


def test_rephrasing_goes_passage_by_passage_with_what_was_written_before():
    calls: list[tuple[str, str, str]] = []

    def keep(passage: str, *, style: str, context: str) -> str:
        calls.append((passage, style, context))
        return passage.upper()

    document = Document("d", ("first part.\n\n" + "second " * 20 + "\n\nthird.",))
    results = list(rephrasings(document, keep, REPHRASE, Counter()))
    assert [style for _, style, _ in calls] == ["plain"] * 3 + ["brief"] * 3
    assert calls[0][2] == "" and calls[1][2] == "FIRST PART.\n\n"
    assert results[0].text.split() == document.text.upper().split()


def test_a_rephrasing_that_lost_its_facts_is_left_out():
    dropped: Counter[str] = Counter()
    document = Document("d", ("It was built in 1912 by Anna Berg, 40 metres high.",))
    lost = list(rephrasings(document, lambda passage, **_: "It was built.", REPHRASE, dropped))
    assert lost == [] and dropped == {"facts lost": 2}
    assert recall(document.text, "Anna Berg built it, 40 metres high, in 1912") == 1


def test_passages_are_whole_paragraphs():
    text = "\n\n".join(f"paragraph {number} " + "word " * number for number in range(20))
    parts = list(passages(text, 120))
    assert "\n\n".join(parts) == text.strip() and len(parts) > 5


def test_a_picture_stands_as_its_tokens_between_markers(processor):
    picture = png(Image.new("RGB", (56, 28), "red"))
    tokens, pictures = encode(Document("a", ("Look: ", picture, "red\n")), processor, 10)
    assert pictures == (picture,)
    text = processor.tokenizer.decode(tokens)
    pads = "<|media_pad|>" * 2
    assert text == (
        f"Look: <|media_begin|>image 56x28<|media_content|>{pads}<|media_end|>red\n[EOS]"
    )


def test_a_conversation_is_rendered_as_the_chat_format(processor):
    picture = png(Image.new("RGB", (28, 28), "red"))
    content = [
        {"type": "image", "image": data_url(picture)},
        {"type": "text", "text": "Colour?"},
    ]
    turns = ({"role": "user", "content": content}, {"role": "assistant", "content": "Red."})
    tokens, pictures = encode(Document("a", messages=turns), processor, 10)
    text = processor.tokenizer.decode(tokens)
    assert pictures == (picture,)
    assert "<|open|>response<|sep|>Red.<|close|>response<|sep|>" in text
    assert "think" not in text and text.endswith("<|end_of_msg|>[EOS]")
    reasoned = ({"role": "assistant", "content": "Red.", "reasoning_content": "I see."},)
    tokens, _ = encode(Document("a", messages=(turns[0], *reasoned)), processor, 10)
    assert "think<|sep|>I see.<|close|>think" in processor.tokenizer.decode(tokens)


def test_markers_spelled_in_a_document_stay_text(processor):
    tokens, _ = encode(Document("a", ("<|media_pad|> and [EOS]\n",)), processor, 10)
    assert processor.tokenizer.media_pad_id not in tokens.tolist()
    assert tokens.tolist().count(processor.tokenizer.eos_id) == 1


def test_a_large_picture_is_scaled_to_the_limit():
    for width, height in itertools.product((29, 200, 900), (31, 77, 1200)):
        picture = png(Image.new("RGB", (width, height)))
        small = Image.open(io.BytesIO(shrink(picture, IMAGES, 12)))
        assert 1 <= IMAGES.num_tokens(*small.size) <= 12
    picture = png(Image.new("RGB", (56, 56)))
    assert shrink(picture, IMAGES, 4) is picture
