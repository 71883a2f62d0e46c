"""The tools that act on a sandbox, as plain functions over a `Workspace`.

A workspace knows a sandbox by the keeper's name for it, so that the sandbox may sleep between two
calls. Paths are relative to the working folder or absolute inside the sandbox. With the process
driver, which has no root of its own, absolute paths inside a *command* are the host's.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import PurePosixPath

from baltoro.agents.task import Task, TaskFile
from baltoro.agents.tools import Observation
from baltoro.sandbox.keeper import Keeper
from baltoro.sandbox.protocol import Binding, Command, ImageError, Sandbox

MAX_TIMEOUT_S = 600
MAX_READ_BYTES = 4 << 20
Function = Callable[..., Awaitable[str | Observation]]


class Workspace:
    """A folder in a sandbox that may be asleep."""

    def __init__(self, keeper: Keeper, name: str, workdir: str, binding: Binding | None = None):
        """`binding`: where the stored sandbox must be; asked for once, at the first use."""
        self.keeper = keeper
        self.name = name
        self.workdir = workdir
        self._binding = binding

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Sandbox]:
        """The sandbox, awake."""
        async with self.keeper.use(self.name, self._binding) as sandbox:
            self._binding = None
            yield sandbox

    def place(self, path: str) -> str:
        """A path as an absolute one inside the sandbox."""
        return str(PurePosixPath(self.workdir) / path)

    async def read_text(self, path: str) -> str:
        """A file's text. `ValueError` if it is none."""
        async with self.open() as sandbox:
            data = await sandbox.read(self.place(path), MAX_READ_BYTES)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path!r} is not UTF-8 text: {error.reason}") from error

    async def write_text(self, path: str, text: str) -> None:
        """Replace a file's text."""
        async with self.open() as sandbox:
            await sandbox.write(self.place(path), text.encode())


async def make_folder(sandbox: Sandbox, path: str) -> None:
    """Make a folder and those above it. `path` is absolute inside the sandbox."""
    inside = path.strip("/")
    if inside:
        result = await sandbox.exec(Command(argv=("mkdir", "-p", "--", inside), cwd="/"))
        if result.exit_code:
            raise ImageError(f"cannot make {path!r}: {result.stderr.decode(errors='replace')}")


async def lay_files(sandbox: Sandbox, task: Task, files: Iterable[TaskFile]) -> None:
    """Write a task's files where they belong."""
    for file in files:
        await sandbox.write(task.place(file.path), file.data, file.mode)


def workspace_functions(workspace: Workspace) -> dict[str, Function]:
    """`shell`, `read`, `write`, `edit` and `search` in a workspace."""

    async def shell(command: str, timeout_s: int = 60) -> Observation:
        """Run a shell command in the working folder and show what it prints.

        command: the command line, run by sh
        timeout_s: seconds after which it is killed, at most 600
        """
        if not 1 <= timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"timeout_s={timeout_s}: must be between 1 and {MAX_TIMEOUT_S}")
        argv = ("sh", "-c", command)
        async with workspace.open() as sandbox:
            result = await sandbox.exec(
                Command(argv=argv, cwd=workspace.workdir, timeout_s=float(timeout_s))
            )
        text = result.stdout.decode(errors="replace") + result.stderr.decode(errors="replace")
        if result.exit_code:
            text += f"\n[exit code {result.exit_code}]"
        return Observation(content=text or "[no output]", is_error=result.exit_code != 0)

    async def read(path: str, first_line: int = 1, num_lines: int = 2000) -> str:
        """Show a text file, each line with its number and a tab before it.

        path: the file
        first_line: the line to begin with, counted from 1
        num_lines: how many lines to show at most
        """
        if first_line < 1 or num_lines < 1:
            raise ValueError(f"first_line={first_line}, num_lines={num_lines}: must be at least 1")
        lines = (await workspace.read_text(path)).splitlines()
        shown = lines[first_line - 1 : first_line - 1 + num_lines]
        if not shown:
            return f"[{path} has {len(lines)} lines]"
        text = "\n".join(f"{first_line + index}\t{line}" for index, line in enumerate(shown))
        num_left = len(lines) - (first_line - 1 + len(shown))
        return text + (f"\n[{num_left} more lines]" if num_left else "")

    async def write(path: str, content: str) -> str:
        """Write a text file, replacing it if it is there and making folders on the way.

        path: the file
        content: its whole new text
        """
        await workspace.write_text(path, content)
        return f"wrote {len(content.encode())} bytes to {path}"

    async def edit(path: str, old: str, new: str, replace_all: bool = False) -> str:
        """Replace a piece of a text file. The piece must occur exactly once, unless all are meant.

        path: the file
        old: the text to replace, exactly as it stands in the file, without line numbers
        new: the text to put there
        replace_all: replace every occurrence
        """
        text = await workspace.read_text(path)
        num_found = text.count(old) if old else 0
        if num_found == 0:
            raise ValueError(f"old does not occur in {path}; read the file and copy the text")
        if num_found > 1 and not replace_all:
            raise ValueError(
                f"old occurs {num_found} times in {path}; give more text around it or replace_all"
            )
        await workspace.write_text(path, text.replace(old, new))
        return f"replaced {num_found} in {path}"

    async def search(pattern: str, path: str = ".") -> str:
        """Find lines that match an extended regular expression in text files, folders included.

        pattern: the expression, as grep -E reads it
        path: the file or folder to search
        """
        argv = ("grep", "-rnIE", "-e", pattern, "--", path)
        async with workspace.open() as sandbox:
            result = await sandbox.exec(Command(argv=argv, cwd=workspace.workdir))
        if result.exit_code > 1:
            raise ValueError(result.stderr.decode(errors="replace").strip())
        return result.stdout.decode(errors="replace") or "[no match]"

    return {function.__name__: function for function in (shell, read, write, edit, search)}
