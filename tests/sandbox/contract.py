"""What every machine driver must show, whatever runs it; the drivers' test files call it."""

import asyncio
import contextlib
import copy
import os
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from baltoro.sandbox.cgroup import Cgroup
from baltoro.sandbox.egress import PORT
from baltoro.sandbox.install import default_prefix
from baltoro.sandbox.machine import MachineDriver, MachineSandbox, Mechanism
from baltoro.sandbox.protocol import (
    Binding,
    Command,
    DriverUnavailableError,
    Image,
    ImageError,
    LimitError,
    Limits,
    Net,
    SandboxError,
    SnapshotError,
)
from baltoro.sandbox.store import Store
from baltoro.sandbox.usage import sample
from baltoro.sandbox.workload import World

ATTACK = """
import ctypes, os, socket, sys, time
def call(name, *args):
    if getattr(ctypes.CDLL(None), name)(*args) == -1:
        sys.exit(13)
def put(path, text):
    os.write(os.open(path, os.O_WRONLY), text)
"""
ATTACKS = {
    "write /proc/sys": "put('/proc/sys/kernel/sysrq', b'1')",
    "press sysrq": "put('/proc/sysrq-trigger', b'h')",
    "core pattern": "put('/proc/sys/kernel/core_pattern', b'|/bin/sh')",
    "write /sys": "put('/sys/kernel/mm/transparent_hugepage/enabled', b'never')",
    "the host's disk": "open('/dev/vda', 'rb').read(1)",
    "a device of one's own": "os.mknod('/work/disk', 0o60600, os.makedev(254, 0))\n"
    "open('/work/disk', 'rb').read(1)",
    "the host's memory": "open('/dev/mem', 'rb').read(1)",
    "network": "socket.create_connection(('10.0.0.1', 80), 2)",
    "a datagram": "socket.socket(2, 2).sendto(b'x', ('8.8.8.8', 53))",
    "a raw socket": "socket.socket(2, 3, 1)",
    "a packet socket": "socket.socket(17, 3, 3)",
    "the hypervisor": "s = socket.socket(40, 1); s.settimeout(3); s.connect((2, 1024))",
    "another root": "os.listdir('/proc/1/root/work/main')",
    "a neighbour's memory": "open('/proc/4194000/mem')",
    "ptrace of the host": f"call('ptrace', 16, {os.getpid()}, 0, 0)",
    "a signal to the host": f"os.kill({os.getpid()}, 0)",
    "mount": "call('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, 0)",
    "a file by its number": "call('open_by_handle_at', os.open('/', 0), b'\\x08' + bytes(31), 0)",
    "a kernel module": "call('syscall', 313, -1, b'', 0)",
    "another kernel": "call('syscall', 246, 0, 0, 0, 0)",
    "a reboot": "call('reboot', 0)",
    "the clock": "time.clock_settime(0, time.time())",
    "the host's keys": "call('syscall', 250, 0, -4, 0)",
    "calls unseen": "call('syscall', 425, 4, bytes(256))",
    "a mount as root of a namespace": "call('unshare', 0x10020000)\n"
    "call('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, 0)",
}
# What may be had where the kernel, and with it what is attacked, is the sandbox's own.
OWN = {
    "gvisor": {"the host's keys", "a mount as root of a namespace"},
    "qemu": {
        "the host's disk",
        "the host's keys",
        "calls unseen",
        "a mount as root of a namespace",
    },
}
FORGERY = """
import ctypes, glob, os, struct, sys
forged = b"".join(struct.pack("<IBII", 4, ord("Z"), i, 0) for i in range(1, 9999))
wrote = []
def attempt(path):
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, forged)
        wrote.append(path)
    except OSError:
        pass
agents = [p for p in os.listdir("/proc") if p.isdigit() and b"agent" in
          open(f"/proc/{p}/cmdline", "rb").read().split(b"\\0")[0]]
libc = ctypes.CDLL(None)
for pid in {"1", *agents}:
    for path in glob.glob(f"/proc/{pid}/fd/*"):
        attempt(path)
    for number in range(16):
        got = libc.syscall(438, libc.syscall(434, int(pid), 0), number, 0)
        if got >= 0:
            wrote.append(f"descriptor {number} of {pid}")
    attempt(f"/proc/{pid}/mem")
    if libc.ptrace(16, int(pid), 0, 0) == 0:
        libc.ptrace(17, int(pid), 0, 0)
        wrote.append(f"ptrace of {pid}")
for path in [*glob.glob("/.agent/*"), *glob.glob("/dev/vport*"), "/dev/mem", "/proc/kcore"]:
    attempt(path)
sys.exit(f"reached {wrote}" if wrote or not agents else 3)
"""
TOOLS = (b"runsc", b"criu", b"qemu-system", b"/agent", b"/cell")
PNG = bytes.fromhex("89504e470d0a1a0a")
IMAGE = default_prefix() / "image/root"
LIMITS = Limits(memory_bytes=512 << 20, max_processes=128, cpus=2.0)


def sh(text: str, **kwargs: object) -> Command:
    return Command(argv=("sh", "-c", text), **kwargs)  # type: ignore[arg-type]


def run(make: Callable[[], Mechanism], folder: Path, body: Callable[..., Awaitable[None]]) -> None:
    """Run `body(driver, sandbox)`; afterwards nothing of the driver may be left."""
    try:
        mechanism = make()
    except DriverUnavailableError as error:
        pytest.skip(str(error))

    made: set[str] = set()

    class Recorded(MachineDriver):
        """Keeps the names of all it ever made."""

        def _new_home(self) -> str:
            made.add(name := super()._new_home())
            return name

    async def main() -> None:
        store = Store(folder / "store", 4 << 30, is_durable=False)
        driver = Recorded(mechanism, folder / "boxes", store)
        try:
            sandbox = await driver.create(Image(root=IMAGE), LIMITS, Net())
            await body(driver, sandbox)
        finally:
            await driver.close()
            store.close()
        assert os.listdir(driver.root) == []

    asyncio.run(asyncio.wait_for(main(), 300))
    # Other tests may run beside this one: what is ours bears our folder or one of our names.
    left = {each for each in leftovers() if any(word in each for word in (str(folder), *made))}
    assert not left, left


def leftovers() -> set[str]:
    """Mounts, control groups and processes of sandboxes that exist now."""
    found = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    for kind in ("memory", "pids", "cpu", "freezer", "."):
        with contextlib.suppress(FileNotFoundError):
            found |= {
                f"{kind}/{n}"
                for n in os.listdir(f"/sys/fs/cgroup/{kind}/baltoro")
                if Path(f"/sys/fs/cgroup/{kind}/baltoro/{n}").is_dir()
            }
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path("/proc", pid, "cmdline").read_bytes()
            is_test = b"python" in words.partition(b"\0")[0]  # its arguments may name a tool
            if not is_test and any(word in words for word in TOOLS):
                groups = Path("/proc", pid, "cgroup").read_text()
                found.add(f"process {pid} {words!r} {groups!r}")
    return found


async def commands_work(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    result = await sandbox.exec(sh("cat; echo out; echo err >&2; exit 7", stdin=b"in "))
    assert (result.stdout, result.stderr, result.exit_code) == (b"in out\n", b"err\n", 7)
    assert (await sandbox.exec(sh("kill -9 $$"))).exit_code == 137
    tty = await sandbox.exec(sh("test -t 0 && echo tty", use_pty=True))
    assert tty.stdout == b"tty\r\n"
    env = await sandbox.exec(sh("echo $X; pwd", env={"X": "y"}, cwd="/work"))
    assert env.stdout == b"y\n/work\n"
    with pytest.raises(ImageError, match="lacks it"):
        await sandbox.exec(Command(argv=("no-such-shell",)))
    with pytest.raises(LimitError, match="timeout_s"):
        await sandbox.exec(sh("sleep 1000", timeout_s=0.3))
    with pytest.raises(LimitError, match="max_output_bytes"):
        process = await sandbox.machine.channel.start(sh("yes"), 1_000_000)
        await process.wait()
    assert (await sandbox.exec(sh("echo fine"))).stdout == b"fine\n"


async def bytes_pass_unchanged(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    """S03, and no path leaves the sandbox."""
    for data in (PNG, bytes(range(256)) * 3, os.urandom(3 << 20), b""):
        await sandbox.write("/work/deep/er/file.bin", data, 0o755)
        assert await sandbox.read("/work/deep/er/file.bin") == data
    await sandbox.exec(sh("ln -s /etc/hostname /work/link; ln -s ../../../.. /work/up"))
    assert await sandbox.read("/work/link") == b"sandbox\n"
    assert await sandbox.read("/work/up/../../etc/hostname") == b"sandbox\n"
    assert await sandbox.read("../../../../etc/hostname") == b"sandbox\n"
    before = Path("/etc/hostname").read_bytes()
    await sandbox.write("/work/up/../../etc/hostname", b"changed\n")
    assert await sandbox.read("/work/link") == b"changed\n"
    assert Path("/etc/hostname").read_bytes() == before
    host_only = driver.root / "secret"
    host_only.write_text("host")
    with pytest.raises(FileNotFoundError):
        await sandbox.read(f"/work/up/{host_only}")
    host_only.unlink()
    with pytest.raises(IsADirectoryError):
        await sandbox.read("/work")
    with pytest.raises(LimitError, match="max_bytes"):
        await sandbox.read("/work/link", max_bytes=3)


async def an_image_without_a_shell_is_named(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    """And the sandbox beside it is unharmed."""
    bare = driver.root.parent / "bare"
    for name in ("proc", "dev", "tmp", "work", ".agent"):
        (bare / name).mkdir(parents=True, exist_ok=True)
    empty = await driver.create(Image(root=bare), LIMITS, Net())
    with pytest.raises(ImageError, match="lacks it"):
        await empty.exec(sh("true"))
    await empty.write("/work/file", b"still a machine")
    assert await empty.read("/work/file") == b"still a machine"
    assert (await sandbox.exec(sh("echo fine"))).stdout == b"fine\n"
    with pytest.raises(ImageError, match="no such folder"):
        await driver.create(Image(root=bare / "none"), LIMITS, Net())


async def attacks_are_denied(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    """Each is tried from inside as root; the host and the neighbour must not notice."""
    neighbour = await driver.create(Image(root=IMAGE), LIMITS, Net())
    await neighbour.write("/work/secret", b"mine")
    for what, attack in ATTACKS.items():
        if what not in OWN.get(driver.name, ()):
            tried = await sandbox.exec(Command(argv=("python3", "-c", ATTACK + attack)))
            is_denied = tried.exit_code == 13 or b"Error: [Errno" in tried.stderr
            is_denied |= b"TimeoutError" in tried.stderr
            assert is_denied, f"{what}: {tried}"
    seen = await sandbox.exec(sh("cat /work/secret; ls /proc | grep -c '^[0-9]'"))
    assert b"mine" not in seen.stdout
    num_kernel_threads = 150 if driver.name == "qemu" else 0
    assert int(seen.stdout) < 20 + num_kernel_threads
    assert await neighbour.read("/work/secret") == b"mine"


async def nobody_speaks_for_the_agent(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    """A program that writes its own exit code into the agent's stream would be paid for it.

    Also in a branch and in the branch of a branch. It reaches nothing and exits 3, or what it wrote
    is told apart and ends its sandbox, by a limit: it is then judged, not forgiven.
    """
    (branch,) = await sandbox.fork(1)
    (grandchild,) = await branch.fork(1)
    for box in (sandbox, branch, grandchild):
        try:
            result = await box.exec(Command(argv=("python3", "-c", FORGERY)))
            assert (result.exit_code, result.stderr) == (3, b""), result.stderr[-300:]
            assert driver.name != "gvisor", "it can be had there"
        except LimitError as error:
            assert "wrote into its agent's stream" in str(error)
            assert driver.name == "gvisor"


SABOTAGE = """
import os, resource, signal
agent = min(int(p) for p in os.listdir("/proc") if p.isdigit() and b"agent" in
            open(f"/proc/{p}/cmdline", "rb").read().split(b"\\0")[0])
attempts = [(os.kill, (who, number)) for who in (agent, -agent) for number in (9, 19, 11, 15)]
attempts += [(resource.prlimit, (agent, resource.RLIMIT_NOFILE, (0, 0)))]
attempts += [(lambda: signal.pidfd_send_signal(os.pidfd_open(agent), 9), ())]
for attempt, words in attempts:
    try:
        attempt(*words)
    except OSError:
        pass
"""


async def nobody_ends_the_agent(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    """Else whoever fears the verdict ends the machine and is forgiven. Also in a branch."""
    (branch,) = await sandbox.fork(1)
    for box in (sandbox, branch):
        await box.exec(Command(argv=("python3", "-c", SABOTAGE)))
        await box.exec(sh("setsid sh -c 'kill -9 -1'"))
        assert (await box.exec(sh("echo here"))).stdout == b"here\n"


async def hogs_are_stopped(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    """A fork bomb and a memory hog, in a sandbox of their own; the neighbour goes on.

    What comes back is a failed command, or a `LimitError` that says which limit to raise.
    """
    limits = Limits(memory_bytes=256 << 20, max_processes=64, cpus=0.5)
    hog = await driver.create(Image(root=IMAGE), limits, Net())
    bomb = "f() { f | f & }; f; sleep 2; echo survived"
    try:
        await hog.exec(sh(bomb, timeout_s=5))
    except LimitError as error:
        assert any(f"{name}=" in str(error) for name in ("timeout_s", "limits.max_processes"))
    assert len(Cgroup(hog.id).pids()) <= 64 if driver.name == "criu" else True
    assert (await sandbox.exec(sh("echo fine", timeout_s=30))).stdout == b"fine\n"
    await hog.destroy()
    hog = await driver.create(Image(root=IMAGE), limits, Net())
    eat = Command(argv=("python3", "-c", "x = b'x' * (1 << 30)"), timeout_s=30)
    try:
        result = await hog.exec(eat)
        assert result.exit_code != 0, "a gigabyte fitted into 256 MiB"
        assert (await hog.exec(sh("echo alive"))).stdout == b"alive\n"
    except LimitError as error:
        assert f"limits.memory_bytes={256 << 20}" in str(error)
        with pytest.raises(LimitError, match="the sandbox is gone: it needed more memory"):
            await hog.snapshot()
    assert (await sandbox.exec(sh("echo fine", timeout_s=30))).stdout == b"fine\n"
    await hog.destroy()


async def files_beyond_the_limit_are_stopped(
    driver: MachineDriver, sandbox: MachineSandbox
) -> None:
    """In a branch that has half of it from its origin; what was replaced or removed is not counted.

    Either a write fails, or the sandbox is ended with the limit named. The neighbour goes on.
    """
    limits = Limits(memory_bytes=384 << 20, disk_bytes=64 << 20)
    origin = await driver.create(Image(root=IMAGE), limits, Net())
    for _ in range(3):
        half = "rm -f /work/half; head -c 33554432 /dev/urandom > /work/half; ls /work"
        assert (await origin.exec(sh(half))).stdout == b"half\n"
        snapshot = await origin.snapshot(mode="stop")
        (origin,) = await driver.restore(snapshot)
    await asyncio.sleep(2.5)
    assert (await origin.exec(sh("echo fine"))).stdout == b"fine\n"
    fill = "for i in $(seq 60); do head -c 8388608 /dev/zero > /work/$i || exit 9; sleep 0.1; done"
    try:
        assert (await origin.exec(sh(fill))).exit_code == 9
    except LimitError as error:
        assert "the sandbox is gone" in str(error)
        assert any(f"limits.{name}" in str(error) for name in ("disk_bytes", "memory_bytes"))
    await sandbox.write("/work/fine", bytes(8 << 20))
    assert (await sandbox.exec(sh("echo fine"))).stdout == b"fine\n"


async def processors_are_shared_out(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    """Half a processor: two loops use no more, also in a branch."""
    if driver.name == "qemu":
        return  # one processor whatever the limit, as its docstring says
    half = await driver.create(Image(root=IMAGE), replace(LIMITS, cpus=0.5), Net())
    (branch,) = await half.fork(1)
    for box in (half, branch):
        loops = await box.start(sh("while :; do :; done & while :; do :; done"))
        await asyncio.sleep(0.3)
        spans = []
        for _ in range(2):
            usage = sample(box)
            assert usage is not None
            spans.append((time.monotonic(), usage.cpu_s))
            await asyncio.sleep(1.5)
        (then, cpu_then), (now, cpu_now) = spans
        assert 0.05 < (cpu_now - cpu_then) / (now - then) < 0.75
        await loops.kill()


async def pauses_keep_files(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    """S01, with a world that stands still while paused."""
    world = await World.start(sandbox, 1)
    await sandbox.pause()
    with pytest.raises(SandboxError, match="paused"):
        await sandbox.exec(sh("true"))
    await sandbox.resume()
    await sandbox.write("/work/two", b"2")
    await sandbox.pause()
    await asyncio.sleep(0.2)
    await sandbox.resume()
    assert await sandbox.read("/work/two") == b"2"
    assert await world.ask("whole()") == "True"


async def branches_diverge(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    """Memory, files, threads, pipes, TCP and a deleted file survive; two branches share nothing."""
    world = await World.start(sandbox, 20)
    await world.ask("x = 41")
    await world.ask("append('origin')")
    binding = Binding(token_position=5, prefix_hash="p", policy_version=1)
    snapshot = await sandbox.snapshot(binding=binding)
    assert driver.store.get(snapshot).binding == binding
    await world.ask("append('after the snapshot')")
    await world.ask("x = 7")
    left, right = await driver.restore(snapshot, 2)
    worlds = [await world.follow(branch) for branch in (left, right)]
    for each in (*worlds, world):
        assert await each.ask("whole()") == "True"
    assert await worlds[0].ask("x") == "41"
    await worlds[0].ask("x += 1")
    await worlds[1].ask("x += 1000")
    answers = [await each.ask("x") for each in (world, *worlds)]
    assert answers == ["7", "42", "1041"]
    await worlds[0].ask("append('left')")
    await worlds[1].ask("append('right')")
    assert await left.read("/work/log") == b"first line\norigin\nleft\n"
    assert await right.read("/work/log") == b"first line\norigin\nright\n"
    assert await sandbox.read("/work/log") == b"first line\norigin\nafter the snapshot\n"
    draws = {await each.ask("os.urandom(8).hex()") for each in worlds}
    assert len(draws) == 2
    grandchild = (await left.fork(1))[0]
    inherited = await worlds[0].follow(grandchild)
    assert await inherited.ask("x") == "42"
    assert await inherited.ask("whole()") == "True"
    assert await grandchild.read("/work/log") == b"first line\norigin\nleft\n"


async def a_paused_sandbox_forks(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    """S02."""
    world = await World.start(sandbox, 1)
    await world.ask("x = 1")
    await sandbox.pause()
    (branch,) = await sandbox.fork(1)
    assert sandbox.state == "paused"
    other = await world.follow(branch)
    await other.ask("x = 2")
    await sandbox.resume()
    assert [await world.ask("x"), await other.ask("x")] == ["1", "2"]


async def a_stopped_sandbox_comes_back(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    world = await World.start(sandbox, 5)
    await world.ask("x = 3")
    snapshot = await sandbox.snapshot(mode="stop")
    assert sandbox.state == "destroyed"
    assert os.listdir(driver.root) == []
    driver.store.pack(snapshot)
    (again,) = await driver.restore(snapshot)
    world = await world.follow(again)
    assert await world.ask("x") == "3"
    assert await world.ask("whole()") == "True"


async def a_lost_create_is_found_by_its_key(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    """S07."""
    request = asyncio.ensure_future(driver.create(Image(root=IMAGE), LIMITS, Net(), key="episode"))
    await asyncio.sleep(0.005)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    found = await driver.create(Image(root=IMAGE), LIMITS, Net(), key="episode")
    assert len(os.listdir(driver.root)) == 2
    assert (await found.exec(sh("echo here"))).stdout == b"here\n"


async def twenty_cycles_leave_nothing(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    """S09. `run` looks for what is left of each of them."""
    for _ in range(20):
        other = await driver.create(Image(root=IMAGE), LIMITS, Net())
        await other.exec(sh("setsid sleep 4242 >/dev/null 2>&1 &"))
        await other.destroy()
        await other.destroy()
    assert len(os.listdir(driver.root)) == 1


async def a_copied_store_wakes_under_another_root(
    driver: MachineDriver, sandbox: MachineSandbox
) -> None:
    """As on another host of the same kind: nothing of the first folder is there any more."""
    world = await World.start(sandbox, 4)
    await world.ask("x = 5")
    await sandbox.write("/work/far", PNG)
    first = await sandbox.snapshot()
    (branch,) = await driver.restore(first)
    world = await world.follow(branch)
    await world.ask("x += 1")
    second = await branch.snapshot(mode="stop")
    driver.store.pack(second)
    away = driver.root.parent / "away"
    away.mkdir()
    subprocess.run(["cp", "-a", str(driver.store.root), str(away / "store")], check=True)
    await sandbox.destroy()
    driver.store.delete(second)
    driver.store.delete(first)
    store = Store(away / "store", 4 << 30, is_durable=False)
    other = MachineDriver(driver.mechanism, away / "boxes", store)
    try:
        (again,) = await other.restore(second)
        world = await world.follow(again)
        assert await world.ask("x") == "6"
        assert await world.ask("whole()") == "True"
        assert await again.read("/work/far") == PNG
    finally:
        await other.close()
        store.close()
    assert os.listdir(other.root) == []


async def a_full_disk_is_named(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    """In a sandbox of its own: the write or the snapshot fails, and the neighbour has room."""
    limits = Limits(memory_bytes=256 << 20, disk_bytes=16 << 20)
    hog = await driver.create(Image(root=IMAGE), limits, Net())
    data = bytes(8 << 20)
    with pytest.raises(SandboxError) as caught:
        for index in range(40):
            await hog.write(f"/work/{index}", data)
        await hog.snapshot()
    assert any(word in str(caught.value) for word in ("disk_bytes", "No space", "gone"))
    await sandbox.write("/work/fine", data)
    assert (await sandbox.exec(sh("echo fine"))).stdout == b"fine\n"
    await hog.destroy()


FETCH = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""


async def only_listed_hosts_answer(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    """Through the proxy, also after a pause and in a branch, which keeps the list and no peer."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhello " + b"x" * 300_000)
        await writer.drain()
        writer.close()

    async def fetch(box: MachineSandbox, url: str) -> str:
        env = {"no_proxy": "", "NO_PROXY": ""}  # our server is on a loopback
        command = Command(argv=("python3", "-c", FETCH, url), env=env)
        return (await box.exec(command)).stdout.decode()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"http://localhost:{port}/"
    with pytest.raises(ValueError, match="allowed_hosts"):
        await driver.create(Image(root=IMAGE), LIMITS, Net(allowed_hosts=("http://x",)))
    listed = await driver.create(
        Image(root=IMAGE), LIMITS, Net(allowed_hosts=(f"localhost:{port}",))
    )
    assert (await fetch(listed, url)).startswith("hello xxx")
    assert "403 localhost:1 is not on" in await fetch(listed, "http://localhost:1/")
    direct = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
    for box in (listed, sandbox):
        assert (await box.exec(Command(argv=("python3", "-c", direct)))).exit_code != 0
    assert "hello" not in await fetch(sandbox, url)
    await listed.pause()
    await listed.resume()
    assert (await fetch(listed, url)).startswith("hello xxx")
    waiting = f"import socket; s = socket.create_connection(('127.0.0.1', {PORT}));"
    waiting += f" s.sendall(b'CONNECT localhost:{port} HTTP/1.1\\r\\n\\r\\n'); s.recv(99);"
    waiting += " print('open', flush=True); print(s.recv(99), flush=True)"
    tunnel = await listed.start(Command(argv=("python3", "-c", waiting)))
    assert (await anext(tunnel.output())).data == b"open\n"
    (branch,) = await listed.fork(1)
    inherited = await branch.attach(tunnel.id)
    assert b"open" not in (ended := await inherited.wait()).stdout
    assert b"ConnectionReset" in ended.stderr or b"b''" in ended.stdout
    assert (await fetch(branch, url)).startswith("hello xxx")
    assert (await fetch(listed, url)).startswith("hello xxx")
    for box in (branch, listed):
        await box.destroy()
    server.close()


@contextlib.asynccontextmanager
async def branches(
    driver: MachineDriver, sandbox: MachineSandbox, num_branches: int
) -> AsyncIterator[list[MachineSandbox]]:
    """Branches of a sandbox, destroyed at the end."""
    made = await sandbox.fork(num_branches)
    yield made
    for branch in made:
        await branch.destroy()


async def sixteen_branches_answer(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    world = await World.start(sandbox, 4)
    async with branches(driver, sandbox, 16) as made:
        worlds = [await world.follow(branch) for branch in made]
        for index, each in enumerate(worlds):
            await each.ask(f"x = {index}")
        assert [await each.ask("x") for each in worlds] == [str(i) for i in range(16)]


async def a_second_snapshot_stores_what_changed(
    driver: MachineDriver, sandbox: MachineSandbox
) -> None:
    """In the origin and in a branch; the chunks of both give back the right world."""
    world = await World.start(sandbox, 20)
    first = await sandbox.snapshot()
    driver.store.pack(first)
    (branch,) = await driver.restore(first)
    worlds = [world, await world.follow(branch)]
    for each in (sandbox, branch):
        driver.store.pack(await each.snapshot())  # which a restore has rearranged
    snapshots = []
    for each, box in zip(worlds, (sandbox, branch), strict=True):
        await each.ask("more = os.urandom(1 << 20)")
        snapshots.append(await box.snapshot())
        new_bytes = driver.store.pack(snapshots[-1])
        dumped = sum(item.size for item in driver.store.get(snapshots[-1]).memory)
        assert (1 << 20) <= new_bytes < dumped / 3, (new_bytes, dumped)
    for each, snapshot in zip(worlds, snapshots, strict=True):
        digest = await each.ask("hashlib.md5(more).hexdigest()")
        (again,) = await driver.restore(snapshot)
        other = await each.follow(again)
        assert await other.ask("hashlib.md5(more).hexdigest()") == digest
        assert await other.ask("whole()") == "True"


async def a_long_line_of_branches_is_flattened(
    driver: MachineDriver, sandbox: MachineSandbox
) -> None:
    """Files written, replaced and deleted in six generations are the same from one layer."""
    world = await World.start(sandbox, 1)
    await sandbox.exec(sh("mkdir /work/old; echo image > /work/old/file"))
    for generation in range(6):
        await world.ask(f"x = {generation}")
        change = f"echo {generation} > /work/each; echo {generation} > /work/file{generation}"
        change += f"; rm -rf /work/file{generation - 2} /work/old /etc/hosts; mkdir /work/old"
        await sandbox.exec(sh(f"{change}; echo {generation} > /work/old/new"))
        snapshot = await sandbox.snapshot(mode="stop")
        (sandbox,) = await driver.restore(snapshot)
        world = await world.follow(sandbox)
    listing = sh(
        "cd /work; for f in each file* old/*; do echo $f; cat $f; done; ls /etc/hosts 2>&1"
    )
    before = (await sandbox.exec(listing)).stdout
    assert before.count(b"\n5\n") == 3 and b"image" not in before
    last = await sandbox.snapshot(mode="stop")
    num_layers = len(driver.store.get(last).layers)
    if driver.name == "criu":
        assert num_layers == 7
    if num_layers > 1:
        driver.store.flatten(last)
        assert len(driver.store.get(last).layers) == 1
    (again,) = await driver.restore(last)
    assert (await again.exec(listing)).stdout == before
    world = await world.follow(again)
    assert [await world.ask("x"), await world.ask("whole()")] == ["5", "True"]


async def a_snapshot_that_does_not_fit_is_refused(
    driver: MachineDriver, sandbox: MachineSandbox
) -> None:
    """Of another kernel, another version of the tool, an image that is not here; named, no harm."""
    await sandbox.write("/work/file", b"kept")
    snapshot = await sandbox.snapshot()
    manifest = driver.store.get(snapshot)
    foreign = {
        "driver_version": (SnapshotError, "restore it where it was taken"),
        "image_root": (ImageError, "/nowhere"),
    }
    if driver.mechanism.is_bound_to_host:
        foreign["host"] = (SnapshotError, "kernel and processor was '/nowhere'")
    for name, (kind, words) in foreign.items():
        driver.store._manifests[snapshot] = replace(manifest, **{name: "/nowhere"})
        with pytest.raises(kind, match=words):
            await driver.restore(snapshot)
    driver.store._manifests[snapshot] = manifest
    (branch,) = await driver.restore(snapshot)
    assert await branch.read("/work/file") + await sandbox.read("/work/file") == b"keptkept"
    assert len(os.listdir(driver.root)) == 2


async def a_store_without_room_keeps_the_sandbox(
    driver: MachineDriver, sandbox: MachineSandbox
) -> None:
    """Alive, stopping, paused: the error is named, and the world goes on as it was."""
    world = await World.start(sandbox, 2)
    quota_bytes, driver.store.quota_bytes = driver.store.quota_bytes, 1
    for mode in ("live", "stop"):
        with pytest.raises(SnapshotError, match="quota_bytes=1; destroy sandboxes or raise"):
            await sandbox.snapshot(mode=mode)
        assert await world.ask("whole()") == "True"
    await sandbox.pause()
    with pytest.raises(SnapshotError, match="quota_bytes=1"):
        await sandbox.snapshot(mode="stop")
    assert sandbox.state == "paused"
    await sandbox.resume()
    assert await world.ask("whole()") == "True"
    assert driver.store.ids() == []
    driver.store.quota_bytes = quota_bytes
    await world.ask("x = 6")
    (again,) = await driver.restore(await sandbox.snapshot(mode="stop"))
    assert await (await world.follow(again)).ask("x") == "6"


async def a_full_host_disk_is_named(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    """Of the store and of sandboxes that share it; once there is room, the world is as it was.

    A QEMU is ended by the kernel if it touches new memory meanwhile, as its docstring says.
    """
    if os.geteuid() != 0:
        pytest.skip("only root mounts a small disk")
    small = driver.root.parent / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(small)], check=True)
    store = Store(small / "store", 4 << 30, is_durable=False)
    mechanism = copy.copy(driver.mechanism)
    if driver.name == "qemu":
        mechanism._templates = None  # they lie on another disk
    crowded = MachineDriver(mechanism, small / "boxes", store)
    try:
        box = await crowded.create(Image(root=IMAGE), LIMITS, Net())
        world = await World.start(box, 2)
        with contextlib.suppress(OSError), (small / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(1 << 20))
        with pytest.raises(SandboxError, match="the disk is full"):
            await box.snapshot()
        with contextlib.suppress(SandboxError):  # it may need no room
            await (await crowded.create(Image(root=IMAGE), LIMITS, Net())).destroy()
        assert (await sandbox.exec(sh("echo fine"))).stdout == b"fine\n"
        (small / "filler").unlink()
        assert store.ids() == []
        try:
            assert await world.ask("whole()") == "True"
            (branch,) = await box.fork(1)
            assert await (await world.follow(branch)).ask("whole()") == "True"
        except SandboxError:
            assert driver.name == "qemu"
    finally:
        await crowded.close()
        store.close()
        subprocess.run(["umount", str(small)], check=True)


async def secrets_stay_outside(driver: MachineDriver, sandbox: MachineSandbox) -> None:
    """What the keeper's process was given is in no environment of a sandbox, nor of a branch."""
    os.environ["BALTORO_TEST_SECRET"] = "hunter2"
    try:
        other = await driver.create(Image(root=IMAGE), LIMITS, Net())
        (branch,) = await other.fork(1)
        for box in (sandbox, other, branch):
            seen = await box.exec(sh("env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline"))
            assert b"PATH=" in seen.stdout and b"hunter2" not in seen.stdout
    finally:
        del os.environ["BALTORO_TEST_SECRET"]


CASES = (
    commands_work,
    bytes_pass_unchanged,
    an_image_without_a_shell_is_named,
    attacks_are_denied,
    nobody_speaks_for_the_agent,
    nobody_ends_the_agent,
    hogs_are_stopped,
    pauses_keep_files,
    branches_diverge,
    a_paused_sandbox_forks,
    a_stopped_sandbox_comes_back,
    a_lost_create_is_found_by_its_key,
    twenty_cycles_leave_nothing,
    sixteen_branches_answer,
    a_copied_store_wakes_under_another_root,
    a_full_disk_is_named,
    only_listed_hosts_answer,
    a_second_snapshot_stores_what_changed,
    a_long_line_of_branches_is_flattened,
    a_snapshot_that_does_not_fit_is_refused,
    a_store_without_room_keeps_the_sandbox,
    secrets_stay_outside,
    a_full_host_disk_is_named,
    files_beyond_the_limit_are_stopped,
    processors_are_shared_out,
)
