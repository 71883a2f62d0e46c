"""Files and functions longer than docs/MAP.md aims for: a prompt to think, never a failure."""

import ast
from pathlib import Path

MAX_FILE_LINES, MAX_TRITON_LINES = 400, 600
MAX_FUNCTION_LINES, MAX_KERNEL_LINES = 80, 150


def beyond_aims(root: Path) -> list[str]:
    """One phrase for each file and function under `root` that is longer than we aim for."""
    found = []
    for path in sorted(root.rglob("*.py")):
        is_triton = path.stem == "triton" or path.parent.name == "triton"
        text = path.read_text()
        num_lines = text.count("\n")
        if num_lines > (MAX_TRITON_LINES if is_triton else MAX_FILE_LINES):
            found.append(f"{path.relative_to(root)} has {num_lines} lines")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > (MAX_KERNEL_LINES if is_triton else MAX_FUNCTION_LINES):
                found.append(f"{path.relative_to(root)} {node.name} has {num_lines} lines")
    return found
