"""Random order without a generator's state: a hash of what is asked for, the same on any machine.

The hash is splitmix64: x += 0x9E3779B97F4A7C15, then two rounds of xor-shift and multiply.
"""

import hashlib

import numpy as np

# 2**64 / golden ratio, odd: its multiples modulo 2**64 are spread evenly (a Weyl sequence).
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def key(*parts: int | str) -> np.uint64:
    """A 64-bit key of a seed and names."""
    text = "\0".join(map(str, parts)).encode()
    return np.uint64(int.from_bytes(hashlib.sha256(text).digest()[:8], "little"))


def permutation(size: int, *parts: int | str) -> np.ndarray:
    """The numbers `0 .. size - 1` in an order that `parts` choose, int64 [size]."""
    with np.errstate(over="ignore"):
        x = np.arange(size, dtype=np.uint64) * GOLDEN + key(*parts)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return np.argsort(x, kind="stable")
