"""Compile a Triton kernel for Hopper without a GPU and read what it takes."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Resources(NamedTuple):
    """What one thread and one program of a kernel take."""

    registers: int
    stack_bytes: int  # spills among them
    shared_bytes: int


def resources(
    kernel: Any, arguments: dict[str, Any], num_warps: int, maxnreg: int | None = None
) -> Resources:
    """Resources of `kernel` on sm_90; `arguments` as `build` takes them."""
    built = build(kernel, arguments, num_warps, maxnreg)
    usage = _dump(built, "-res-usage")
    found = {name: re.search(rf"{name}:(\d+)", usage) for name in ("REG", "STACK")}
    assert all(found.values()), usage
    return Resources(*(int(match[1]) for match in found.values() if match), built.metadata.shared)


def machine_code(
    kernel: Any, arguments: dict[str, Any], num_warps: int, maxnreg: int | None = None
) -> str:
    """The instructions of `kernel` for sm_90, one a line; `arguments` as `build` takes them."""
    code = re.sub(r"/\*.*?\*/", "", _dump(build(kernel, arguments, num_warps, maxnreg), "-sass"))
    lines = [line.strip() for line in code.splitlines()]
    return "\n".join(line for line in lines if line.endswith(";"))


def build(
    kernel: Any, arguments: dict[str, Any], num_warps: int, maxnreg: int | None = None
) -> Any:
    """`kernel` compiled for sm_90.

    `arguments` gives each its type as Triton writes it ("*bf16", "i32", a tuple of such), or its
    value if it is a compile-time argument or None. Pointers are taken to be aligned to 16 bytes, as
    torch's are; "i32:16" is a multiple of 16.
    """
    signature, constants, attributes = {}, {}, {}
    assert set(arguments) == set(kernel.arg_names), set(arguments) ^ set(kernel.arg_names)
    constexprs = {kernel.arg_names[index] for index in kernel.constexprs}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name in constexprs or value is None:
            signature[name] = "constexpr"
            constants[(index,)] = value
            continue
        if isinstance(value, tuple):
            signature[name] = value
            for j in range(len(value)):
                attributes[(index, j)] = [["tt.divisibility", 16]]
            continue
        signature[name] = value.removesuffix(":16")
        if value.startswith("*") or value.endswith(":16"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = kind(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "maxnreg": maxnreg}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _dump(built: Any, flag: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        return subprocess.run(
            [CUOBJDUMP, flag, file.name], capture_output=True, text=True, check=True
        ).stdout
