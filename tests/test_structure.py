"""The shape of the tree: who imports whom, where imports stand, which rooms do without torch.

import-linter holds the layers; this walks the sources for what layers cannot say.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sizes import beyond_aims

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "baltoro"

# From the top down; rooms of one row do not know each other.
LAYERS = [
    {"cli", "doctor"},
    {"recipes"},
    {"rl", "eval"},
    {"train", "serve", "agents"},
    {"checkpoint", "data", "sandbox"},
    {"parallel"},
    {"model", "optim"},
    {"ops", "text"},
    {"config"},
]
# What the layers would allow and the room must still not import.
NEVER = {
    "ops": {"config"},
    "text": {"torch"},
    "config": {"torch"},
    "sandbox": {"torch", "model", "optim", "ops", "parallel", "text"},
    "agents": {"torch", "model", "optim", "ops", "parallel", "data", "checkpoint"},
    "data": {"model", "optim", "ops", "parallel"},
    "eval": {"train"},
    "model": {"torch.distributed"},
}
# Files without torch inside rooms that have it.
TORCH_FREE = {
    "cli.py",
    "__init__.py",
    "data/config.py",
    "model/config.py",
    "train/config.py",
    "serve/answer.py",
    "serve/cache.py",
    "serve/layout.py",
    "serve/pages.py",
    "serve/prefix.py",
    "serve/request.py",
    "serve/sampling.py",
    "serve/scheduler.py",
    "serve/tier.py",
}
OPTIONAL_PACKAGES = {"tyro", "triton", "datasketch", "imagehash", "pyarrow"}


def sources() -> list[Path]:
    return sorted(SOURCES.rglob("*.py"))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    """`baltoro.ops.kda` for its `__init__.py`, `baltoro.ops.kda.reference` for a file."""
    parts = path.relative_to(SOURCES.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "baltoro" and len(parts) > 1 else None


def targets(node: ast.AST) -> list[str]:
    """Modules that an import statement may name, the most exact first."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(path: Path) -> Iterator[tuple[ast.AST, str, bool]]:
    """Every import of a file: the statement, the module, and whether a function holds it."""
    pending: list[tuple[ast.AST, bool]] = [(tree(path), False)]
    while pending:
        node, is_inside = pending.pop()
        if is_type_checking(node):
            continue
        for target in targets(node):
            yield node, target, is_inside
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        pending += [(child, is_inside or is_function) for child in ast.iter_child_nodes(node)]


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def layer_of(room: str) -> int:
    for depth, rooms in enumerate(LAYERS):
        if room in rooms:
            return depth
    raise AssertionError(f"{room} has no place in LAYERS")


def test_every_room_has_a_place():
    rooms = {room_of(name_of(path)) for path in sources()} - {None}
    assert rooms <= set().union(*LAYERS)


def test_imports_point_down():
    wrong = []
    for path in sources():
        room = room_of(name_of(path))
        if room is None:
            continue
        for node, target, _ in imports(path):
            other = room_of(target)
            if target == "baltoro.__version__" or other is None or other == room:
                continue
            if layer_of(other) <= layer_of(room):
                wrong.append(f"{where(path, node)}: {room} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_no_room_imports_what_it_must_never():
    wrong = []
    for path in sources():
        for node, target, _ in imports(path):
            for banned in NEVER.get(room_of(name_of(path)) or "", ()):
                if f"{target}.".startswith((f"{banned}.", f"baltoro.{banned}.")):
                    wrong.append(f"{where(path, node)}: {target}")
    assert not wrong, "\n".join(wrong)


def test_imports_stand_at_the_top_of_the_file():
    wrong = []
    for path in sources():
        if path in (SOURCES / "cli.py", SOURCES / "__init__.py"):
            continue
        for node, target, is_inside in imports(path):
            if is_inside and target.split(".")[0] not in OPTIONAL_PACKAGES:
                wrong.append(f"{where(path, node)}: {target}")
    assert not wrong, "\n".join(wrong)


def test_files_form_no_cycle():
    modules = {name_of(path): path for path in sources()}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = {target for _, target, is_inside in imports(path) if not is_inside}
        found |= {target.rpartition(".")[0] for target in found}
        graph[module] = {target for target in found & set(modules) if target != module}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " > ".join((*trail[trail.index(module) :], module))
        if module in done:
            return
        for target in sorted(graph[module]):
            visit(target, (*trail, module))
        done.add(module)

    for module in sorted(graph):
        visit(module, ())


def torch_free_modules() -> list[str]:
    rooms = {room for room, banned in NEVER.items() if "torch" in banned}
    return [
        name_of(path)
        for path in sources()
        if room_of(name_of(path)) in rooms or str(path.relative_to(SOURCES)) in TORCH_FREE
    ]


def test_torch_free_files_load_without_torch():
    """In a process where torch cannot be imported, so that an indirect import counts too."""
    code = "import sys; sys.modules['torch'] = None\n" + "\n".join(
        f"import {module}" for module in torch_free_modules()
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernels_and_references_do_not_know_each_other():
    wrong = []
    for path in (SOURCES / "ops").rglob("*.py"):
        for node, target, _ in imports(path):
            is_kernel_file = path.stem == "triton" or path.parent.name == "triton"
            if (is_kernel_file and ".reference" in target) or (
                path.stem == "reference" and ".triton" in target
            ):
                wrong.append(f"{where(path, node)}: {target}")
    assert not wrong, "\n".join(wrong)


def test_no_catch_all_room_or_file():
    banned = {"utils", "common", "misc", "helpers", "core", "base"}
    assert not [path for path in sources() if banned & {*path.parts[-3:-1], path.stem}]


def test_nothing_reads_the_environment_or_swallows_errors():
    wrong = []
    for path in sources():
        for node in ast.walk(tree(path)):
            text = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.ExceptHandler)) else ""
            is_guest = path.parent.name == "guest"  # a script that is given its environment
            is_environment = not is_guest and bool(
                {"os.environ", "os.getenv"} & {text, *targets(node)}
            )
            is_catch_all = isinstance(node, ast.ExceptHandler) and (
                node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            )
            # the boundaries at which a failure becomes data
            is_boundary = room_of(name_of(path)) in ("agents", "sandbox") or path.stem == "server"
            if is_environment or (is_catch_all and not is_boundary):
                wrong.append(f"{where(path, node)}: {ast.unparse(node).splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


def test_what_is_longer_than_we_aim_for_is_found(tmp_path):
    body = "\n".join("    x = 1" for _ in range(90))
    (tmp_path / "long.py").write_text("x = 1\n" * 401)
    (tmp_path / "triton.py").write_text(f"def kernel():\n{body}\n")
    (tmp_path / "one.py").write_text(f"def wide():\n{body}\n")
    assert beyond_aims(tmp_path) == ["long.py has 401 lines", "one.py wide has 91 lines"]


def test_the_map_names_every_room_and_no_path_that_is_not_there():
    text = (ROOT / "docs" / "MAP.md").read_text()
    named = set(re.findall(r"`((?:[a-z0-9_]+/)*[a-z0-9_]+(?:\.py|/))`", text))
    rooms = {path.name + "/" for path in SOURCES.iterdir() if (path / "__init__.py").exists()}
    assert rooms <= named
    places = (SOURCES, ROOT)
    assert not [path for path in named if not any((place / path).exists() for place in places)]
