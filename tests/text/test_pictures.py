"""Opening pictures that others send."""

import base64
import io
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from baltoro.text.pictures import FORMATS, MAX_PIXELS, open_picture

SOURCE = Image.fromarray(np.arange(40 * 30 * 3, dtype=np.uint8).reshape(30, 40, 3))


def encoded(kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    SOURCE.save(buffer, kind)
    return buffer.getvalue()


def huge_png(width: int, height: int) -> bytes:
    """A header that promises a picture, with hardly any data behind it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0"))


def test_a_picture_opens_from_all_that_may_hold_one(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(encoded())
    url = "data:image/png;base64," + base64.b64encode(encoded()).decode()
    for source in (SOURCE, np.asarray(SOURCE), encoded(), path, url):
        assert (np.asarray(open_picture(source)) == np.asarray(SOURCE)).all()
    rgba = np.zeros((2, 3, 4), dtype=np.uint8)
    assert open_picture(rgba).mode == "RGBA"


@pytest.mark.parametrize("kind", FORMATS)
def test_the_usual_formats_open(kind):
    assert open_picture(encoded(kind)).size == (40, 30)


@pytest.mark.parametrize(
    "source",
    [
        "/etc/hostname",
        "file:///etc/hostname",
        "http://example.com/a.png",
        "data:image/png,plain",
        "data:image/png;base64,***",
        "data:image/png;base64,AAAA",
        "data:image/png;base64",
        "",
        b"",
        b"no picture",
        None,
        7,
        np.zeros((4, 4, 3), dtype=np.float32),
        np.zeros((4, 4), dtype=np.uint8),
        np.zeros((0, 4, 3), dtype=np.uint8),
    ],
)
def test_everything_else_is_refused(source):
    with pytest.raises(ValueError, match="image"):
        open_picture(source)


def test_a_plain_string_is_never_taken_for_a_path(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(encoded())
    with pytest.raises(ValueError, match="only data URLs"):
        open_picture(str(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "missing.png", tmp_path):
        with pytest.raises(ValueError, match=str(path)):
            open_picture(path)


def test_an_empty_picture_is_refused():
    with pytest.raises(ValueError, match="0x5 pixels"):
        open_picture(Image.new("RGB", (0, 5)))


@pytest.mark.parametrize("kind", FORMATS)
def test_broken_files_raise_value_errors_only(kind):
    rng = random.Random(kind)
    whole = encoded(kind)
    num_refused = 0
    for _ in range(150):
        data = bytearray(whole[: rng.randrange(len(whole))] if rng.random() < 0.3 else whole)
        for _ in range(rng.randrange(6) if data else 0):
            data[rng.randrange(min(len(data), rng.choice([60, 10_000])))] = rng.randrange(256)
        try:
            open_picture(bytes(data))
        except ValueError as error:
            num_refused += str(error).startswith("image bytes: ")
    assert num_refused > 20


def test_a_decompression_bomb_is_refused_before_it_is_unpacked():
    for width, height in ((20_000, 20_000), (2, MAX_PIXELS), (60_000, 60_000)):
        with pytest.raises(ValueError, match=r"pixels|readable"):
            open_picture(huge_png(width, height))


def test_a_picture_of_ten_thousand_squared_is_no_bomb():
    with pytest.raises(ValueError, match="is broken"):
        open_picture(huge_png(10_000, 10_000))
