"""Opening pictures that others send; odd formats, sizes and broken files are refused clearly."""

import base64
import binascii
import io
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image, UnidentifiedImageError

Picture: TypeAlias = Image.Image | np.ndarray | bytes | str | Path

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 1 << 27  # 134 million; 10,000 x 10,000 is below, a decompression bomb above

# What Pillow's decoders raise for broken files, beside OSError.
_DECODER_ERRORS = (SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error)


SizeCheck: TypeAlias = Callable[[int, int], None]  # of width and height; raises `ValueError`


def _any_size(width: int, height: int) -> None:
    """Accept it."""


def open_picture(picture: Picture, check: SizeCheck = _any_size) -> Image.Image:
    """A loaded picture.

    picture: a Pillow image; an array uint8 [height, width, 3 or 4]; the bytes of a file; a `Path`;
        or a `data:` URL with base64. A plain string is never taken for a path or fetched, so that
        what a stranger sends can neither read files nor reach the network.
    check: asked before a file's picture is unpacked.

    Raises `ValueError` for anything unreadable, empty or above `MAX_PIXELS`.
    """
    if isinstance(picture, Image.Image):
        return _loaded(picture, "image", check)
    if isinstance(picture, np.ndarray):
        return _from_array(picture)
    if isinstance(picture, Path):
        return _from_file(picture, check)
    if isinstance(picture, bytes):
        return _from_bytes(picture, "image bytes", check)
    if isinstance(picture, str):
        return _from_bytes(_data_of_url(picture), "image data URL", check)
    raise ValueError(f"image={picture!r}: must be a picture, bytes, a Path or a data URL")


def _from_array(pixels: np.ndarray) -> Image.Image:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (3, 4):
        raise ValueError(
            f"image array {pixels.dtype} {pixels.shape}: must be uint8 [height, width, 3 or 4]"
        )
    if not pixels.size:
        raise ValueError(f"image array {pixels.shape}: is empty")
    return Image.fromarray(pixels)


def _from_file(path: Path, check: SizeCheck) -> Image.Image:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"image {path}: cannot be read ({error.strerror})") from error
    return _from_bytes(data, f"image {path}", check)


def _data_of_url(url: str) -> bytes:
    head, comma, data = url.partition(",")
    if not (head.startswith("data:") and head.endswith(";base64") and comma):
        raise ValueError(
            f"image={url[:60]!r}: only data URLs with base64 are read; fetch others yourself, and "
            "give a file as pathlib.Path"
        )
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"image data URL: is not base64 ({error})") from error


def _from_bytes(data: bytes, where: str, check: SizeCheck) -> Image.Image:
    try:
        with warnings.catch_warnings():
            # Pillow warns of pictures above half its limit; ours is checked below.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        # its own words are about a buffer in memory
        raise ValueError(f"{where}: is no readable {', '.join(FORMATS)}") from None
    except (OSError, Image.DecompressionBombError, *_DECODER_ERRORS) as error:
        raise ValueError(f"{where}: is no readable {', '.join(FORMATS)} ({error})") from error
    return _loaded(picture, where, check)


def _loaded(picture: Image.Image, where: str, check: SizeCheck) -> Image.Image:
    width, height = picture.size
    if not 1 <= width * height <= MAX_PIXELS:
        raise ValueError(f"{where}: {width}x{height} pixels; must be 1 to {MAX_PIXELS} in all")
    check(width, height)
    try:
        picture.load()
    except (OSError, *_DECODER_ERRORS) as error:
        raise ValueError(f"{where}: is broken ({error})") from error
    return picture
