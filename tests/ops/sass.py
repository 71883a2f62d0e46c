"""Compile a Hopper kernel without a GPU and read the machine code.

The ptxas of CUDA 12.8 (in Triton 3.6 and 3.7) can lose track of the uniform register pair that
holds the descriptor of global memory when a kernel has many wgmma operands: it then reads that pair
where an operand's address should be, and the product is garbage. `lost_memory_descriptors` sees it.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from baltoro.ops.kda.triton.gradients_sm90 import gradients_sm90_kernel
from baltoro.ops.kda.triton.prep_sm90 import prep_sm90_kernel
from baltoro.ops.kda.triton.scan_sm90 import forward_scan_sm90_kernel, reverse_scan_sm90_kernel
from baltoro.ops.kda.triton.segments_sm90 import segment_ends_sm90_kernel

KERNELS = {
    "prep": prep_sm90_kernel,
    "gradients": gradients_sm90_kernel,
    "forward_scan": forward_scan_sm90_kernel,
    "reverse_scan": reverse_scan_sm90_kernel,
    "segment_ends": segment_ends_sm90_kernel,
}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
FP32 = {
    "a_log", "dt_bias", "gamma", "chunk_beta", "norms", "initial_state", "final_state",
    "d_initial_state", "d_final_state", "d_bias_parts", "d_rate_parts", "ends",
    "transitions",
}  # fmt: skip
LOGITS = {"g", "beta", "dg", "dbeta"}  # bf16 as logits, else fp32
INT32 = {"table", "offsets", "cu_seqlens"}
SCALARS = {
    "scale": "fp32", "eps": "fp32", "lower_bound": "fp32", "num_heads": "i32",
    "num_sequences": "i32", "length": "i32",
}  # fmt: skip


def absent(constants: dict[str, object]) -> set[str]:
    """Pointers that are None under these compile-time arguments."""
    names = set()
    if not constants.get("FROM_LOGITS", True):
        names |= {"a_log", "dt_bias"}
    if not constants.get("HAS_INITIAL", True):
        names |= {"initial_state"}
    if not constants.get("HAS_FINAL", True):
        names |= {"d_final_state"}
    return names


def sass_of(name: str, constants: dict[str, object], maxnreg: int | None = None) -> tuple[str, str]:
    """Machine code and resource report of kernel `name` for sm_90, its registers bounded or not."""
    kernel = KERNELS[name]
    signature, constexprs, attributes = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants or argument in absent(constants):
            signature[argument] = "constexpr"
            constexprs[(i,)] = constants.get(argument)
            continue
        if argument in SCALARS:
            signature[argument] = SCALARS[argument]
        elif argument in INT32:
            signature[argument] = "*i32"
        else:
            is_fp32 = argument in FP32 or (
                argument in LOGITS and not constants.get("FROM_LOGITS", True)
            )
            signature[argument] = "*fp32" if is_fp32 else "*bf16"
        if argument not in SCALARS or argument == "num_heads":
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": 4, "maxnreg": maxnreg}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        reports = [
            subprocess.run(
                [CUOBJDUMP, flag, file.name], capture_output=True, text=True, check=True
            ).stdout
            for flag in ("-sass", "-res-usage")
        ]
    code = re.sub(r"/\*.*?\*/", "", reports[0])
    lines = [line.strip() for line in code.splitlines()]
    return "\n".join(line for line in lines if line.endswith(";")), reports[1]


def resources(usage: str) -> int:
    """Bytes of stack a thread."""
    found = re.search(r"STACK:(\d+)", usage)
    assert found, usage
    return int(found[1])


def _right_descriptor(match: re.Match[str]) -> str:
    return f"gdesc[UR{int(match[1]) + 2}]"


def lost_memory_descriptors(sass: str) -> list[str]:
    """Instructions that use the global memory descriptor as data, or a wrong one for memory."""
    bad: list[str] = []
    holders: set[int] = set()
    copies: set[str] = set()
    for line in sass.splitlines():
        match = re.match(r"(?:@!?U?P\w+ )?(\S+)\s+(.*);", line.strip())
        if not match:
            continue
        opcode, operands = match[1], match[2]
        for pair in re.findall(r"(?<!g)desc\[UR(\d+)\]", operands):
            if not {int(pair), int(pair) + 1} <= holders:
                bad.append(line)
        target, *sources = re.sub(r"(?<!g)desc\[UR\d+\]", "", operands).split(",")
        if opcode.startswith("HGMMA") and sources[0].strip().startswith("R"):
            # of four registers only the last two are read: the right operand's
            sources = [re.sub(r"gdesc\[UR(\d+)\]", _right_descriptor, x) for x in sources]
        target = target.strip()
        uniform = re.match(r"UR(\d+)", target)
        if opcode == "ULDC.64" and "c[0x0][0x208]" in operands and uniform:
            holders |= {int(uniform[1]), int(uniform[1]) + 1}
            continue
        reads_holder = any(
            int(register) in holders
            for source in sources
            for register in re.findall(r"\bUR(\d+)\b", source)
        )
        if reads_holder and opcode == "MOV":
            copies.add(target)
        elif reads_holder and opcode != "UMOV":
            bad.append(line)
        if uniform:
            is_copy = (opcode == "UMOV" and reads_holder) or (
                opcode == "R2UR" and sources[-1].strip() in copies
            )
            for register in range(2 if ".64" in opcode else 1):
                number = int(uniform[1]) + register
                holders = holders | {number} if is_copy else holders - {number}
        elif re.fullmatch(r"R\d+", target) and opcode != "MOV":
            copies.discard(target)
    return bad
