"""gVisor: a kernel in user space per sandbox, whose snapshot holds memory and files together.

The image is read only; everything written lives in the sentry's memory, so one file is the whole
snapshot, no host mount is made, and deleted-but-open files survive. An ordinary user runs the same
inside a user namespace of its own.

Stops: every system call ends in the sentry, so mounts, /proc and /sys writes, ptrace of
neighbours, raw network and host files are out of reach; there is no network but loopback, and
listed hosts through the proxy of `egress.py`. As root
a control group bounds memory (files included), processes and CPU. Does NOT stop, as an ordinary
user: a sandbox that eats the host's memory, processes or CPU, for want of a control group. In no
case: side channels of the shared processor, and faults of the sentry itself.

Snapshots are full dumps and stop the machine while they run; the store's packing makes the second
one small on disk. One `runsc` process per machine stays; nothing else.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from baltoro.sandbox.cgroup import Cgroup
from baltoro.sandbox.channel import Channel, open_pipes
from baltoro.sandbox.host import kill_named, log_tail, run_output
from baltoro.sandbox.install import find_tool
from baltoro.sandbox.manifest import Manifest
from baltoro.sandbox.protocol import (
    DriverUnavailableError,
    Image,
    ImageError,
    Isolation,
    Limits,
    SandboxError,
    SnapshotError,
)
from baltoro.sandbox.store import Draft

BOOT_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 120.0
GUEST_CAPABILITIES = (
    "CAP_AUDIT_WRITE CAP_CHOWN CAP_DAC_OVERRIDE CAP_FOWNER CAP_FSETID CAP_KILL"
    " CAP_NET_BIND_SERVICE CAP_SETGID CAP_SETPCAP CAP_SETUID CAP_SYS_CHROOT"
)


class GvisorMachine:
    """One sentry (`baltoro.sandbox.machine.Machine`)."""

    base_layers: tuple[str, ...] = ()

    def __init__(self, mechanism: "Gvisor", sandbox_id: str, home: Path, channel: Channel):
        self.channel = channel
        self._mechanism = mechanism
        self._id = sandbox_id
        self._home = home
        self._is_paused = False

    async def freeze(self) -> None:
        await self._call("pause", self._id)
        self._is_paused = True

    async def thaw(self) -> None:
        if self._is_paused:  # a running one refuses
            await self._call("resume", self._id)
            self._is_paused = False

    async def dump(self, draft: Draft, *, is_frozen: bool, is_last: bool) -> Mapping[str, str]:
        if is_frozen:  # a paused sentry refuses to dump; the quiet agent shows nothing meanwhile
            await self.thaw()
        words = ["checkpoint", f"--image-path={draft.memory}", *self._mechanism.dump_flags]
        words.append("--leave-running")  # also if it is the last, which may not find room
        try:
            await self._call(*words, self._id)
        except SandboxError as error:
            if is_frozen:
                with contextlib.suppress(SandboxError):  # it may be gone
                    await self.freeze()
            raise SnapshotError(f"sandbox {self._id}: {error}") from error
        if is_frozen and not is_last:
            await self.freeze()
        return {}

    async def end(self) -> None:
        await self.channel.close()
        await self._mechanism.sweep(self._id, self._home)

    async def _call(self, *words: str) -> None:
        await self._mechanism.call(self._home, *words)


class Gvisor:
    """Machines run by `runsc` (`baltoro.sandbox.machine.Mechanism`)."""

    name = "gvisor"
    isolation: Isolation = "user-space kernel"
    needs_root = False
    is_bound_to_host = True

    def __init__(self, prefix: Path, build: str = "runsc"):
        """`build` is a tool of `install`: `runsc` (systrap) or `runsc-ptrace` (slower, older)."""
        self._runsc = find_tool(prefix, build)
        self._agent = Path(find_tool(prefix, "agent")[0])
        self._is_ptrace = build == "runsc-ptrace"
        self._is_root = os.geteuid() == 0
        self._holder: asyncio.subprocess.Process | None = None
        self._version: str | None = None
        self.dump_flags = () if self._is_ptrace else ("--compression=none",)

    async def version(self) -> str:
        if self._version is None:
            out = await run_output([*self._runsc, "--version"])
            self._version = out.split("\n")[0].removeprefix("runsc version ")
        return self._version

    async def boot(
        self, sandbox_id: str, home: Path, image: Image, limits: Limits
    ) -> GvisorMachine:
        self._write_bundle(home, image)
        channel = await self._launch(sandbox_id, home, limits, ["run"], first_id=1)
        try:
            await channel.hello(BOOT_TIMEOUT_S)
        except SandboxError as error:
            await channel.close()
            raise ImageError(f"{error}; runsc said: {log_tail(home / 'runsc.log')}") from error
        return GvisorMachine(self, sandbox_id, home, channel)

    async def revive(
        self, sandbox_id: str, home: Path, manifest: Manifest, memory: Path, layers: list[Path]
    ) -> GvisorMachine:
        self._write_bundle(home, Image(root=Path(manifest.image_root)))
        words = ["restore", f"--image-path={memory}"]
        first_id = int(manifest.notes["next_id"])
        channel = await self._launch(sandbox_id, home, manifest.limits, words, first_id)
        return GvisorMachine(self, sandbox_id, home, channel)

    async def sweep(self, sandbox_id: str, home: Path) -> None:
        if self._is_root:
            await Cgroup(sandbox_id).end()
        await kill_named(home / "pid", sandbox_id)

    async def close(self) -> None:
        if self._holder is not None:
            self._holder.kill()
            await self._holder.wait()
            getattr(self._holder, "_transport").close()  # noqa: B009
            self._holder = None

    async def call(self, home: Path, *words: str) -> None:
        """Run one `runsc` command to its end. `SandboxError` with its last words if it fails."""
        command = [*await self._entering(), *self._runsc, *self._flags(home), *words]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, err = await asyncio.wait_for(process.communicate(), CALL_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise SandboxError(f"runsc {words[0]}: no end within {CALL_TIMEOUT_S} s") from None
        if process.returncode != 0:
            raise SandboxError(f"runsc {words[0]} failed: {err.decode(errors='replace')[-300:]}")

    async def _launch(
        self, sandbox_id: str, home: Path, limits: Limits, words: list[str], first_id: int
    ) -> Channel:
        """Start a sentry that outlives this call, its agent on a pair of pipes."""
        command = [*await self._entering(), *self._runsc, *self._flags(home), *words]
        command += ["--detach", f"--bundle={home}", f"--pid-file={home / 'pid'}", sandbox_id]
        group = Cgroup(sandbox_id)
        if self._is_root:
            group.open(limits)
            command = group.entering(command)
        guest_in, host_out = os.pipe()
        host_in, guest_out = os.pipe()
        with (home / "runsc.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=guest_in, stdout=guest_out, stderr=log
            )
        os.close(guest_in)
        os.close(guest_out)
        channel = Channel(await open_pipes(host_in, host_out), first_id)
        channel.over_limit = lambda: group.over_limit(limits)
        if await process.wait() != 0:
            await channel.close()
            raise SandboxError(f"runsc {words[0]} failed: {log_tail(home / 'runsc.log')}")
        return channel

    async def _entering(self) -> list[str]:
        """Words that run a command in this driver's user namespace; none for root."""
        if self._is_root:
            return []
        if self._holder is None:
            # It ends with us: its standard input is our pipe.
            self._holder = await asyncio.create_subprocess_exec(
                *("unshare", "-Urm", "sh", "-c", "echo ready; read line"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            assert self._holder.stdout is not None and self._holder.stderr is not None
            if await self._holder.stdout.readline() != b"ready\n":
                reason = (await self._holder.stderr.read()).decode(errors="replace").strip()
                raise DriverUnavailableError(
                    f"gvisor: no user namespace for an ordinary user ({reason}); allow them or run"
                    " as root"
                )
        target = str(self._holder.pid)
        return ["nsenter", "--preserve-credentials", "-U", "-m", "-t", target]

    def _flags(self, home: Path) -> list[str]:
        flags = [f"--root={home / 'state'}", "--ignore-cgroups", "--network=none"]
        if self._is_ptrace:
            return [*flags, "--platform=ptrace", "--overlay"]
        return [*flags, "--platform=systrap", "--overlay2=root:memory"]

    def _write_bundle(self, home: Path, image: Image) -> None:
        if not (image.root / ".agent").is_dir():
            raise ImageError(
                f"image {image.root}: has no folder .agent, where the agent is mounted; make an"
                f" empty one: mkdir {image.root}/.agent"
            )
        (home / "state").mkdir()
        mounts = [_mount("/proc", "proc"), _mount("/dev", "tmpfs"), _mount("/sys", "sysfs")]
        # An ordinary user does not own the image's folders: what must be writable is a tmpfs.
        mounts += [_mount(path, "tmpfs") for path in ("/tmp", "/run", "/dev/shm")]
        if not self._is_root:
            mounts += [_mount(path, "tmpfs") for path in ("/root", "/work", "/home")]
        agent = {"type": "bind", "source": str(self._agent.parent), "options": ["ro", "rbind"]}
        mounts.append({"destination": "/.agent", **agent})
        capabilities = GUEST_CAPABILITIES.split()
        kinds = ("bounding", "effective", "permitted", "inheritable")
        spec = {
            "ociVersion": "1.0.2",
            "hostname": "sandbox",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": ["/.agent/agent", "0", "1"],
                "env": ["PATH=/usr/bin:/bin"],
                "cwd": "/",
                "noNewPrivileges": True,
                "capabilities": dict.fromkeys(kinds, capabilities),
            },
            "root": {"path": str(image.root), "readonly": False},
            "mounts": mounts,
            "linux": {
                "namespaces": [{"type": t} for t in ("pid", "mount", "ipc", "uts", "network")]
            },
        }
        (home / "config.json").write_text(json.dumps(spec))


def _mount(path: str, kind: str) -> dict[str, object]:
    return {"destination": path, "type": kind, "source": kind}
