"""Pictures that are made with their text: rendered lines to read, charts, shapes with SVG source.

Coordinates are given twice, in pixels and as shares of the picture's sides (report, section 3.1).
Every document is a function of the seed, its kind and its number.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from baltoro.data.config import MadeConfig
from baltoro.data.document import Document, conversation, data_url
from baltoro.data.images import png

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_COLOURS = {
    "red": "#d62728",
    "blue": "#1f4fd6",
    "green": "#2a9d3a",
    "orange": "#f28e1c",
    "purple": "#8a3fb5",
    "black": "#111111",
    "grey": "#8a8a8a",
}
_PAPERS = ("#ffffff", "#fdf6e3", "#eef4ff", "#f3fbea")
_SIGNS = (
    "Open {a}:00 to {b}:00",
    "Room {a}{b}",
    "Platform {a}, {b} min",
    "Exit {a} left",
    "Bus {a}{b} north",
    "Bread {a}.{b}0",
    "Speed limit {b}0",
    "Total: {a}{b}.50",
    "Gate B{a}",
    "{word} {a} kg",
    "Mind the {word}",
    "{word} Street {b}",
    "No {word} here",
    "Page {a} of {b}{a}",
    "{word} and {other}",
    "Fresh {word}",
)
_WORDS = (
    *("Apple", "Garden", "Winter", "Paper", "Stone", "River", "Honey"),
    *("Copper", "Salt", "Lemon", "Maple", "Amber", "Willow"),
)
_LABELS = (
    ("rain in mm", "Mon Tue Wed Thu Fri Sat Sun"),
    ("visitors", "May Jun Jul Aug Sep Oct"),
    ("eggs", "Ada Bo Cy Di Ed"),
    ("hours", "read walk cook sleep play"),
    ("trees", "oak fir elm ash yew"),
)


def documents(source: MadeConfig, seed: int) -> Iterator[Document]:
    """The documents of a made source of pictures."""
    make = {"rendered_text": rendered_text, "chart": chart, "shapes": shapes}[source.kind]
    fonts = font_paths(source.fonts)
    for number in range(source.num_documents):
        rng = random.Random(f"{seed}/{source.kind}/{number}")
        yield make(rng, fonts, f"{source.kind} {number}")


def font_paths(folders: Sequence[Path]) -> list[Path]:
    """TrueType files under folders, sorted; folders that do not exist hold none."""
    return sorted(path for folder in folders for path in folder.rglob("*.ttf"))


def rendered_text(rng: random.Random, fonts: Sequence[Path], name: str) -> Document:
    """One to three lines to read; every second one as a question and its answer."""
    lines = [_sign(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    size = rng.choice((13, 15, 18))
    font = _font(rng, fonts, size)
    boxes = [font.getbbox(line) for line in lines]
    width = int(max(box[2] for box in boxes)) + 12
    picture = Image.new("RGB", (width, (size + 6) * len(lines) + 8), rng.choice(_PAPERS))
    draw = ImageDraw.Draw(picture)
    ink = rng.choice(("#000000", "#1a2b5c", "#5c1a1a"))
    for index, line in enumerate(lines):
        draw.text((6, 4 + index * (size + 6)), line, fill=ink, font=font)
    text = "\n".join(lines)
    if rng.random() < 0.5:
        return _answered(name, picture, rng.choice(_READ), text)
    return Document(name, (png(picture), f"\nText in the picture:\n{text}\n"))


def chart(rng: random.Random, fonts: Sequence[Path], name: str) -> Document:
    """A bar or line chart with the numbers it shows, or with a question about them."""
    title, labels_text = rng.choice(_LABELS)
    labels = labels_text.split()
    labels = labels[: rng.randrange(3, len(labels) + 1)]
    values = [rng.randrange(1, 10) for _ in labels]
    colour = rng.choice(list(_COLOURS))
    is_bar = rng.random() < 0.6
    font = _font(rng, fonts, 10)
    width, height, base = 28 * len(labels) + 14, 112, 92
    picture = Image.new("RGB", (width, height), "#ffffff")
    draw = ImageDraw.Draw(picture)
    draw.text((4, 2), title, fill="#000000", font=font)
    draw.line([(6, base), (width - 4, base)], fill="#000000")
    tops = [(14 + 28 * index, base - 7 * value) for index, value in enumerate(values)]
    for (x, y), label, value in zip(tops, labels, values, strict=True):
        if is_bar:
            draw.rectangle([x - 5, y, x + 9, base - 1], fill=_COLOURS[colour])
        draw.text((x - 4, base + 3), label, fill="#000000", font=font)
        draw.text((x - 1, y - 12), str(value), fill="#000000", font=font)
    if not is_bar:
        draw.line(tops, fill=_COLOURS[colour], width=2)
    best = labels[values.index(max(values))]
    if rng.random() < 0.4 and values.count(max(values)) == 1:
        return _answered(name, picture, f"Which has the most {title}?", f"{best}: {max(values)}.")
    kind = "bar" if is_bar else "line"
    rows = "\n".join(f"{label},{value}" for label, value in zip(labels, values, strict=True))
    text = f"\nA {colour} {kind} chart.\nlabel,{title}\n{rows}\nThe sum is {sum(values)}.\n"
    return Document(name, (png(picture), text))


def shapes(rng: random.Random, fonts: Sequence[Path], name: str) -> Document:
    """One to three shapes with their SVG, or with where each of them is."""
    width, height = rng.choice(((112, 112), (140, 84), (84, 112)))
    picture = Image.new("RGB", (width, height), "#ffffff")
    draw = ImageDraw.Draw(picture)
    elements, places = [], []
    for colour in rng.sample(list(_COLOURS), rng.choice((1, 2, 3))):
        radius = rng.randrange(8, 20)
        x = rng.randrange(radius, width - radius)
        y = rng.randrange(radius, height - radius)
        kind = rng.choice(list(_SHAPES))
        _SHAPES[kind](draw, x, y, radius, _COLOURS[colour])
        elements.append(
            _SVG[kind].format(
                x=x,
                y=y,
                r=radius,
                d=2 * radius,
                l=x - radius,
                t=y - radius,
                R=x + radius,
                b=y + radius,
                c=colour,
            )
        )
        places.append(
            f"a {colour} {kind} at ({x}, {y}), that is ({x / width:.2f}, {y / height:.2f})"
        )
    if rng.random() < 0.4:
        return _answered(name, picture, "What is where?", "; ".join(places) + ".")
    source = f'<svg width="{width}" height="{height}">\n' + "\n".join(elements) + "\n</svg>"
    return Document(name, (png(picture), f"\n{source}\nIn {width}x{height} pixels: {places[0]}.\n"))


_READ = ("What does it say?", "Read the sign.", "Copy the text.", "What is written here?")


def _circle(draw: ImageDraw.ImageDraw, x: int, y: int, radius: int, fill: str) -> None:
    draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=fill)


def _square(draw: ImageDraw.ImageDraw, x: int, y: int, radius: int, fill: str) -> None:
    draw.rectangle([x - radius, y - radius, x + radius, y + radius], fill=fill)


def _triangle(draw: ImageDraw.ImageDraw, x: int, y: int, radius: int, fill: str) -> None:
    draw.polygon([(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)], fill=fill)


_SHAPES: dict[str, Callable[[ImageDraw.ImageDraw, int, int, int, str], None]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
}
_SVG = {
    "circle": '<circle cx="{x}" cy="{y}" r="{r}" fill="{c}"/>',
    "square": '<rect x="{l}" y="{t}" width="{d}" height="{d}" fill="{c}"/>',
    "triangle": '<polygon points="{x},{t} {R},{b} {l},{b}" fill="{c}"/>',
}


def _sign(rng: random.Random) -> str:
    word, other = rng.sample(_WORDS, 2)
    return rng.choice(_SIGNS).format(
        a=rng.randrange(1, 10), b=rng.randrange(1, 10), word=word, other=other
    )


def _font(rng: random.Random, fonts: Sequence[Path], size: int) -> Font:
    return ImageFont.truetype(rng.choice(fonts), size) if fonts else ImageFont.load_default(size)


def _answered(name: str, picture: Image.Image, question: str, answer: str) -> Document:
    content = [
        {"type": "image", "image": data_url(png(picture))},
        {"type": "text", "text": question},
    ]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return conversation(name, messages)
