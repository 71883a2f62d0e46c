"""What the launch table holds, for tests that compile all of it."""

from baltoro.ops.launch_table import Launch, pinned


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
