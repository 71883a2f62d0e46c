"""Names of prefixes: a chain of hashes, one per complete hash block.

Each hash covers all tokens before it, the weights that computed them, the caller's salt, and the
pictures behind placeholder tokens, which all look alike. Equal hashes mean equal states.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """A picture's place in a prompt."""

    start: int  # first placeholder token
    stop: int  # one past the last
    digest: bytes  # of the picture's content


def root_hash(weights_version: str, salt: str = "") -> bytes:
    """The start of a chain; prefixes under another version or salt never match."""
    text = f"{len(weights_version)}:{weights_version}{salt}"
    data = text.encode("utf-8", "surrogatepass")  # JSON may spell half a pair
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def extend_chain(
    chain: list[bytes],
    root: bytes,
    tokens: Sequence[int],
    hash_block: int,
    media: Sequence[MediaSpan] = (),
) -> None:
    """Append to `chain` the hashes of the complete blocks of `tokens` that it lacks."""
    for block in range(len(chain), len(tokens) // hash_block):
        start, stop = block * hash_block, (block + 1) * hash_block
        digest = hashlib.blake2b(chain[-1] if chain else root, digest_size=DIGEST_BYTES)
        digest.update(array("q", tokens[start:stop]).tobytes())
        for span in media:
            if span.start < stop and start < span.stop:
                digest.update(span.digest + (span.start - start).to_bytes(8, "little", signed=True))
        chain.append(digest.digest())


def num_common(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """How many blocks two chains share; a chained hash equals only if all before it do."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[middle - 1] == second[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
