"""The spellings that XTML is made of, and the segment, the unit in which it is encoded.

A tag is `<|open|>name key="value"<|sep|>` or `<|close|>name<|sep|>`; a message ends with
`<|end_of_msg|>`. These four are single tokens; everything else in a tag is ordinary text.
"""

from typing import NamedTuple

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MSG = "<|end_of_msg|>"
MARKERS = (OPEN, CLOSE, SEP, END_OF_MSG)

MEDIA_BEGIN = "<|media_begin|>"
MEDIA_CONTENT = "<|media_content|>"
MEDIA_END = "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"

# Ordinary text, in no vocabulary: it only holds the place of an image until prompts are known.
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"


class Segment(NamedTuple):
    """Text that is encoded on its own: BPE never merges across the edge of a segment."""

    text: str
    allow_special: bool  # whether spellings of special tokens in `text` become those tokens
