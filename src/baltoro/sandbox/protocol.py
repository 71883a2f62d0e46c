"""What every sandbox driver promises: the records that cross the door, errors, verbs.

A driver makes sandboxes; a sandbox is one isolated machine that can stop, cost nothing, come back
and split. What a driver can do is found by running it (`baltoro.sandbox.selftest`), never by
looking for files, and published as `Capabilities`. Nothing here starts a process.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

SnapshotMode = Literal["live", "stop"]
Isolation = Literal["none", "namespaces", "user-space kernel", "virtual machine"]
State = Literal["running", "paused", "destroyed"]
MAX_FORKS = 64
MIB = 1 << 20


class SandboxError(Exception):
    """The machine under the agent failed, not the agent: the rollout is recorded, not judged."""


class DriverUnavailableError(SandboxError):
    """This driver cannot run here; the message says why and what to install or change."""


class ImageError(SandboxError):
    """The image cannot be started or lacks what was asked of it."""


class LimitError(SandboxError):
    """The sandbox hit one of its own limits: time, output, memory, files, processes.

    Its doing, not the machine's. It goes on, unless the message says that it is gone.
    """


class SnapshotError(SandboxError):
    """A snapshot is missing, half, of another machine, or could not be taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one sandbox may use. A driver that cannot hold one of them says so in its docstring."""

    cpus: float = 1.0  # cores
    memory_bytes: int = 512 * MIB
    disk_bytes: int = 1024 * MIB  # of files written by the sandbox
    max_processes: int = 256
    max_output_bytes: int = 64 * MIB  # of one command, both streams together

    def __post_init__(self) -> None:
        for name in ("cpus", "memory_bytes", "disk_bytes", "max_processes", "max_output_bytes"):
            value = getattr(self, name)
            if value <= 0:
                raise ValueError(f"limits.{name}={value!r}: must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class Net:
    """Network of a sandbox: loopback only, unless hosts are allowed through the host's proxy."""

    allowed_hosts: tuple[str, ...] = ()  # names, `.suffix` or `host:port`; see `egress.py`


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """A root directory that sandboxes share and never write."""

    root: Path

    def __post_init__(self) -> None:
        if not self.root.is_absolute():
            raise ValueError(f"image.root={str(self.root)!r}: must be an absolute path")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A program to run inside a sandbox."""

    argv: tuple[str, ...]
    cwd: str = "/"
    env: Mapping[str, str] = field(default_factory=dict)  # on top of PATH and HOME
    stdin: bytes | None = b""  # None: left open, fed by `Process.write_stdin`
    timeout_s: float | None = 60.0  # None: no limit
    use_pty: bool = False  # stderr then comes with stdout

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0]:
            raise ValueError(f"command.argv={self.argv!r}: needs a program")
        if len(self.argv) > 1000 or len(self.env) > 900:
            raise ValueError(
                f"command.argv has {len(self.argv)} words: at most 1000, and 900 of env"
            )
        for word in (*self.argv, self.cwd, *self.env, *self.env.values()):
            if "\0" in word:
                raise ValueError(f"command={word!r}: holds a NUL byte")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise ValueError(f"command.timeout_s={self.timeout_s!r}: must be positive or None")


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """A piece of what a command wrote."""

    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """How a command ended."""

    exit_code: int  # 128 + signal if a signal ended it
    stdout: bytes
    stderr: bytes
    wall_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """The place of a snapshot in a trajectory: a restored world must match the restored prefix."""

    token_position: int
    prefix_hash: str
    policy_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a driver was seen to do on this machine; every flag comes from a run."""

    driver: str
    isolation: Isolation
    is_available: bool
    reason: str = ""  # why not, if it is not
    has_memory_snapshot: bool = False
    has_fork: bool = False  # two branches that diverged in memory and files
    has_live_snapshot: bool = False
    has_many_processes: bool = False  # a process tree survives, not one process
    needs_root: bool = False
    latency_ms: Mapping[str, float] = field(default_factory=dict)


class Process(Protocol):
    """A command that runs inside a sandbox. It survives a snapshot, under the same `id`."""

    id: int

    def output(self) -> AsyncIterator[Output]:
        """What it writes, as it comes; ends with the command. Raises `LimitError` on overflow."""

    async def write_stdin(self, data: bytes) -> None:
        """Feed its standard input; empty `data` closes it."""

    async def kill(self, signal: int = 9) -> None:
        """Send a signal to its process group."""

    async def wait(self) -> ExecResult:
        """Collect the rest of its output and its exit code.

        Raises `LimitError` if it outlives its time or output limit; it is killed first.
        """


class Sandbox(Protocol):
    """One isolated machine. Verbs on a destroyed one raise `SandboxError`."""

    id: str
    state: State
    frozen_s: float  # of the last snapshot: how long its programs stood still

    async def start(self, command: Command) -> Process:
        """Run a command without waiting. `ImageError` if the image lacks the program."""

    async def exec(self, command: Command) -> ExecResult:
        """Run a command to its end."""

    async def attach(self, process_id: int) -> Process:
        """The process of that id, in a branch that inherited it."""

    async def read(self, path: str, max_bytes: int = 64 * MIB) -> bytes:
        """A file's bytes. Resolved inside the sandbox's root whatever links say.

        Raises `FileNotFoundError`, `IsADirectoryError`, `PermissionError` or `LimitError`.
        """

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Replace a file's bytes, making folders on the way. `LimitError` if the disk is full."""

    async def pause(self) -> None:
        """Stop using CPU; memory stays. Does nothing if paused."""

    async def resume(self) -> None:
        """Go on after `pause`. Does nothing if running."""

    async def snapshot(
        self, mode: SnapshotMode = "live", parent: str | None = None, binding: Binding | None = None
    ) -> str:
        """Memory and files of one moment, committed to the store; returns its id.

        `live` goes on afterwards, `stop` destroys the sandbox once the snapshot is committed.
        """

    async def fork(self, num_branches: int) -> Sequence["Sandbox"]:
        """Independent copies, also of a paused sandbox, which stays paused. At most 64."""

    async def destroy(self) -> None:
        """End it and remove every process, mount and file of it. Twice is fine."""


class Driver(Protocol):
    """A way of making sandboxes."""

    name: str

    async def create(
        self, image: Image, limits: Limits, net: Net, key: str | None = None
    ) -> Sandbox:
        """A new sandbox. The same `key` again returns the one already made under it."""

    async def restore(self, snapshot_id: str, num_branches: int = 1) -> Sequence[Sandbox]:
        """New sandboxes that continue from a snapshot. `SnapshotError` if it does not fit here."""

    async def gc(self) -> list[str]:
        """Remove what a dead driver left behind; returns a line per thing removed."""

    async def close(self) -> None:
        """Destroy all sandboxes of this driver."""


def check_branches(num_branches: int) -> None:
    """Raise `ValueError` unless `num_branches` is between 1 and 64."""
    if not 1 <= num_branches <= MAX_FORKS:
        raise ValueError(f"num_branches={num_branches!r}: must be between 1 and {MAX_FORKS}")
