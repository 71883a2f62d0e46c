"""`baltoro data`: build the data of a recipe, check a data folder, show its card."""

from functools import partial
from pathlib import Path
from typing import Literal

from baltoro.data.build import build
from baltoro.data.dataset import verify
from baltoro.data.manifest import CARD, read_manifest
from baltoro.data.recipes import recipe


def data(
    action: Literal["build", "check", "show"],
    target: str,
    *,
    out: Path | None = None,
    vocab_size: int | None = None,
) -> None:
    """Data for training, from text and pictures on this machine.

    Args:
        action: `build` a recipe (`tiny`: what comes with baltoro, seconds; `machine`: what this
            machine has, minutes), or go on with a build that was stopped; `check` every file of a
            data folder; `show` its card.
        target: the recipe to build, or the folder.
        out: folder to build in; without it runs/data/RECIPE.
        vocab_size: ids of the tokenizer to train; without it the recipe's own.
    """
    if action == "build":
        folder = out or Path("runs", "data", target)
        manifest = build(recipe(target, vocab_size), folder, report=partial(print, flush=True))
        print(f"{folder}: {manifest.num_tokens:,} tokens; see {folder / CARD}")
        return
    folder = Path(target)
    if out is not None or vocab_size is not None:
        raise ValueError(f"data {action}: takes a folder and no option")
    if action == "check":
        verify(folder)
        print(f"{folder}: every file is as it was built")
    else:
        read_manifest(folder)
        print((folder / CARD).read_text(encoding="utf-8"), end="")
