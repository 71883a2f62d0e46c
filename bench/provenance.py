"""Which commit a result belongs to."""

import subprocess


def commit_of(given: str | None) -> str:
    """`given`, for a tree without its history, or the commit that is checked out."""
    if given is not None:
        return given
    words = ["git", "rev-parse", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
