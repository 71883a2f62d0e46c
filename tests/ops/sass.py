"""Read the machine code of a Hopper kernel for a fault of its assembler.

The ptxas of CUDA 12.8 (in Triton 3.6 and 3.7) can lose track of the uniform register pair that
holds the descriptor of global memory when a kernel has many wgmma operands: it then reads that pair
where an operand's address should be, and the product is garbage. `lost_memory_descriptors` sees it.
"""

import re


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
