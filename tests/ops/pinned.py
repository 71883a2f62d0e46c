"""What the launch table holds, for tests that compile all of it."""

from collections.abc import Callable
from typing import TypeVar
from unittest import mock

import torch

from baltoro.ops import launch_table
from baltoro.ops.launch_table import Launch, forget, pinned

CPU = torch.device("cpu")
Found = TypeVar("Found")


def shapes_of(kernel: str, *classes: str) -> list[Launch]:
    """The different launch shapes of a kernel's classes, of every device."""
    found: list[Launch] = []
    for kernels in pinned().values():
        for shape_class in classes:
            shape = kernels.get(kernel, {}).get(shape_class)
            if shape is not None and shape not in found:
                found.append(shape)
    assert found, f"{kernel} {classes} is in no section"
    return found


def on_every_device(look_up: Callable[[torch.device], Found]) -> list[Found]:
    """The different answers of a look-up that is given the CPU, as if it were of each section."""
    found: list[Found] = []
    for section in pinned():
        forget()
        with mock.patch.object(launch_table, "section_of", lambda _, name=section: name):
            answer = look_up(CPU)
        if answer not in found:
            found.append(answer)
    forget()
    return found
