"""The always-there driver: lifecycle, bytes, bounds, confinement, and nothing left behind."""

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from baltoro.sandbox import process
from baltoro.sandbox.process import ProcessDriver, ProcessSandbox
from baltoro.sandbox.protocol import (
    Binding,
    Command,
    Image,
    ImageError,
    LimitError,
    Limits,
    Net,
    SandboxError,
    SnapshotError,
)
from baltoro.sandbox.store import Store

PNG = bytes.fromhex("89504e470d0a1a0a")
Body = Callable[[ProcessDriver, ProcessSandbox], Awaitable[None]]


def run_with_sandbox(tmp_path: Path, body: Body, limits: Limits | None = None) -> None:
    image = tmp_path / "image"
    image.mkdir()
    (image / "hello.txt").write_text("from the image")
    store = Store(tmp_path / "store", 1 << 30)

    async def main() -> None:
        driver = ProcessDriver(tmp_path / "sandboxes", store)
        try:
            sandbox = await driver.create(Image(root=image), limits or Limits(), Net())
            await body(driver, sandbox)
        finally:
            await driver.close()
        assert list(driver.root.iterdir()) == []

    try:
        asyncio.run(main())
    finally:
        store.close()


def sh(text: str, **kwargs: object) -> Command:
    return Command(argv=("sh", "-c", text), **kwargs)  # type: ignore[arg-type]


def test_a_command_reports_both_streams_and_its_exit_code(tmp_path):
    async def body(driver, sandbox):
        result = await sandbox.exec(sh("cat; echo out; echo err >&2; exit 7", stdin=b"in "))
        assert (result.stdout, result.stderr, result.exit_code) == (b"in out\n", b"err\n", 7)
        killed = await sandbox.exec(sh("kill -9 $$"))
        assert killed.exit_code == 137

    run_with_sandbox(tmp_path, body)


def test_output_streams_while_the_command_runs(tmp_path):
    async def body(driver, sandbox):
        process = await sandbox.start(sh("echo one; read x; echo got $x", stdin=None))
        seen = []
        async for piece in process.output():
            seen.append(piece.data)
            if piece.data == b"one\n":
                await process.write_stdin(b"two\n")
        assert b"".join(seen) == b"one\ngot two\n"

    run_with_sandbox(tmp_path, body)


def test_a_pty_is_a_terminal(tmp_path):
    async def body(driver, sandbox):
        result = await sandbox.exec(sh("test -t 0 && test -t 1 && echo tty", use_pty=True))
        assert result.stdout == b"tty\r\n"

    run_with_sandbox(tmp_path, body)


def test_bytes_pass_through_write_and_read_unchanged(tmp_path):
    """S03, and every byte value, and 3 MB."""

    async def body(driver, sandbox):
        for data in (PNG, bytes(range(256)) * 3, os.urandom(3 << 20), b""):
            await sandbox.write("deep/er/file.bin", data, 0o755)
            assert await sandbox.read("/deep/er/file.bin") == data
        assert (await sandbox.exec(sh("test -x deep/er/file.bin"))).exit_code == 0

    run_with_sandbox(tmp_path, body)


@pytest.mark.parametrize(
    "path", ["link/passwd", "abs", "../../../../etc/passwd", "a/../../../etc/passwd", "late/passwd"]
)
def test_no_path_leaves_the_folder(tmp_path, path):
    async def body(driver, sandbox):
        await sandbox.exec(
            sh("mkdir a; ln -s /etc link; ln -s /etc/passwd abs; ln -s ../../../../../../etc late")
        )
        with pytest.raises(FileNotFoundError):
            await sandbox.read(path)
        before = Path("/etc/passwd").read_bytes()
        await sandbox.write(path, b"owned")
        assert await sandbox.read(path) == b"owned"
        assert Path("/etc/passwd").read_bytes() == before

    run_with_sandbox(tmp_path, body)


def test_a_fifo_is_refused_instead_of_hanging(tmp_path):
    async def body(driver, sandbox):
        await sandbox.exec(sh("mkfifo trap"))
        with pytest.raises(OSError, match="not a regular file"):
            await sandbox.read("trap")

    run_with_sandbox(tmp_path, body)


def test_files_survive_two_pauses_with_a_write_between(tmp_path):
    """S01."""

    async def body(driver, sandbox):
        await sandbox.write("one", b"1")
        await sandbox.pause()
        await sandbox.resume()
        await sandbox.write("two", b"2")
        await sandbox.pause()
        await sandbox.resume()
        assert await sandbox.read("one") + await sandbox.read("two") == b"12"
        assert await sandbox.read("hello.txt") == b"from the image"

    run_with_sandbox(tmp_path, body)


def test_a_paused_process_stands_still(tmp_path):
    async def body(driver, sandbox):
        loop = "i=0; while :; do i=$((i+1)); echo $i > n; sleep 0.01; done"
        process = await sandbox.start(sh(loop, timeout_s=None))
        while not (sandbox.files / "n").exists():
            await asyncio.sleep(0.01)
        await sandbox.pause()
        await asyncio.sleep(0.05)
        first = (sandbox.files / "n").read_bytes()
        await asyncio.sleep(0.1)
        assert (sandbox.files / "n").read_bytes() == first
        with pytest.raises(SandboxError, match="paused"):
            await sandbox.exec(sh("true"))
        await sandbox.resume()
        while (sandbox.files / "n").read_bytes() == first:
            await asyncio.sleep(0.01)
        await process.kill()

    run_with_sandbox(tmp_path, body)


def test_a_paused_sandbox_forks_and_branches_diverge(tmp_path):
    """S02; the origin stays paused."""

    async def body(driver, sandbox):
        await sandbox.write("shared", b"base")
        await sandbox.pause()
        left, right = await sandbox.fork(2)
        assert sandbox.state == "paused"
        await left.exec(sh("echo left >> shared"))
        await right.exec(sh("rm shared"))
        assert await left.read("shared") == b"baseleft\n"
        with pytest.raises(FileNotFoundError):
            await right.read("shared")
        assert await sandbox.read("shared") == b"base"

    run_with_sandbox(tmp_path, body)


def test_a_snapshot_carries_its_place_in_the_trajectory(tmp_path):
    async def body(driver, sandbox):
        binding = Binding(token_position=1234, prefix_hash="ab12", policy_version=7)
        snapshot = await sandbox.snapshot(mode="stop", binding=binding)
        assert sandbox.state == "destroyed"
        assert driver.store.get(snapshot).binding == binding
        (again,) = await driver.restore(snapshot)
        child = await again.snapshot()
        assert driver.store.get(child).parent == snapshot
        assert again.limits.max_processes == 99

    run_with_sandbox(tmp_path, body, Limits(max_processes=99))


def test_a_snapshot_that_finds_no_room_lets_the_sandbox_go_on(tmp_path, monkeypatch):
    async def body(driver, sandbox):
        await sandbox.write("file", b"kept")
        driver.store.quota_bytes = 1
        with pytest.raises(SnapshotError, match="quota_bytes=1"):
            await sandbox.snapshot(mode="stop")
        driver.store.quota_bytes = 1 << 30

        def seal(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(process, "seal_tree", seal)
            with pytest.raises(SandboxError, match="disk is full"):
                await sandbox.snapshot()
        assert (sandbox.state, await sandbox.read("file")) == ("running", b"kept")
        assert driver.store.ids() == []
        assert driver.store.recover() == []
        snapshot = await sandbox.snapshot()
        with monkeypatch.context() as patch:
            patch.setattr(process, "seal_tree", seal)
            with pytest.raises(SandboxError, match="disk is full"):
                await driver.restore(snapshot, 2)
        assert os.listdir(driver.root) == [sandbox.id]

    run_with_sandbox(tmp_path, body)


def test_an_endless_command_is_killed_and_named(tmp_path):
    async def body(driver, sandbox):
        with pytest.raises(LimitError, match=r"timeout_s=0\.2"):
            await sandbox.exec(sh("sleep 1000", timeout_s=0.2))
        assert (await sandbox.exec(sh("echo fine"))).stdout == b"fine\n"

    run_with_sandbox(tmp_path, body)


def test_endless_output_is_cut_and_named(tmp_path):
    async def body(driver, sandbox):
        with pytest.raises(LimitError, match="max_output_bytes=100000"):
            await sandbox.exec(sh("yes"))
        assert (await sandbox.exec(sh("echo fine"))).stdout == b"fine\n"

    run_with_sandbox(tmp_path, body, Limits(max_output_bytes=100_000))


def test_output_that_nobody_reads_does_not_keep_a_killed_command(tmp_path):
    async def body(driver, sandbox):
        process = await sandbox.start(sh("yes"))
        await asyncio.sleep(0.3)  # until every buffer between it and us is full
        await asyncio.wait_for(process.end(), 10)
        assert process.exit_code == 137

    run_with_sandbox(tmp_path, body)


def test_a_missing_program_is_an_image_error(tmp_path):
    async def body(driver, sandbox):
        with pytest.raises(ImageError, match="no-such-shell"):
            await sandbox.exec(Command(argv=("no-such-shell", "-c", "true")))

    run_with_sandbox(tmp_path, body)


def test_the_same_key_gives_the_same_sandbox(tmp_path):
    """S07: the first answer was lost; asking again must not leave a second machine behind."""

    async def body(driver, sandbox):
        image = Image(root=tmp_path / "image")
        first = await driver.create(image, Limits(), Net(), key="episode-1")
        again = await driver.create(image, Limits(), Net(), key="episode-1")
        assert again is first
        await first.destroy()
        assert await driver.create(image, Limits(), Net(), key="episode-1") is not first

    run_with_sandbox(tmp_path, body)


def test_a_create_that_was_given_up_is_found_by_its_key_and_one_that_failed_leaves_nothing(
    tmp_path, monkeypatch
):
    """S07's neighbours: asked again while the first is still being made, and on a full disk."""
    seal = process.seal_tree

    def slow(*words):
        time.sleep(0.2)
        return seal(*words)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    async def body(driver, sandbox):
        image = Image(root=tmp_path / "image")
        with monkeypatch.context() as patch:
            patch.setattr(process, "seal_tree", slow)
            first = asyncio.ensure_future(driver.create(image, Limits(), Net(), key="episode"))
            await asyncio.sleep(0.05)
            first.cancel()
            found = await driver.create(image, Limits(), Net(), key="episode")
        assert await found.read("hello.txt") == b"from the image"
        assert len(list(driver.root.iterdir())) == 2
        with monkeypatch.context() as patch:
            patch.setattr(process, "seal_tree", full)
            with pytest.raises(SandboxError, match="disk is full"):
                await driver.create(image, Limits(), Net(), key="other")
        assert len(list(driver.root.iterdir())) == 2
        with monkeypatch.context() as patch:
            patch.setattr(process, "seal_tree", full)
            given_up = asyncio.ensure_future(driver.create(image, Limits(), Net(), key="other"))
            await asyncio.sleep(0)
            given_up.cancel()
            await driver._keys.settle()
        again = await driver.create(image, Limits(), Net(), key="other")
        assert await again.read("hello.txt") == b"from the image"

    run_with_sandbox(tmp_path, body)


def test_a_background_job_outlives_its_command(tmp_path):
    async def body(driver, sandbox):
        await sandbox.exec(sh("(sleep 0.1; echo late > done) > /dev/null 2>&1 &"))
        for _ in range(100):
            if (sandbox.files / "done").exists():
                break
            await asyncio.sleep(0.02)
        assert await sandbox.read("done") == b"late\n"

    run_with_sandbox(tmp_path, body)


def test_twenty_cycles_leave_nothing(tmp_path):
    """S09, with a daemon that left its session in each."""

    async def body(driver, sandbox):
        image = Image(root=tmp_path / "image")
        for _ in range(20):
            other = await driver.create(image, Limits(), Net())
            await other.exec(sh("setsid sh -c 'sleep 4242' >/dev/null 2>&1 &"))
            await other.destroy()
            await other.destroy()
        assert [home.name for home in driver.root.iterdir()] == [sandbox.id]
        commands = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                commands.append(Path("/proc", pid, "cmdline").read_bytes())
            except OSError:
                continue
        assert b"sleep\x004242\x00" not in commands

    run_with_sandbox(tmp_path, body)


@pytest.mark.slow
def test_two_hundred_lives_leave_no_process_descriptor_mount_or_file(tmp_path):
    """Each with a command that runs on, a daemon, a paused moment, a snapshot and a branch."""

    def held():
        mounts = Path("/proc/self/mountinfo").read_text()
        return len(os.listdir("/proc/self/fd")), mounts, len(asyncio.all_tasks())

    async def body(driver, sandbox):
        image = Image(root=tmp_path / "image")
        for index in range(201):
            other = await driver.create(image, Limits(), Net())
            await other.start(Command(argv=("sleep", "4243"), timeout_s=None))
            await other.exec(sh("setsid sh -c 'sleep 4243' >/dev/null 2>&1 &"))
            await other.write("file", b"x")
            await other.pause()
            (branch,) = await other.fork(1)
            for each in (other, branch):
                await each.destroy()
            if index == 0:
                before = held()
        assert held() == before
        assert [home.name for home in driver.root.iterdir()] == [sandbox.id]
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                assert b"sleep\x004243\x00" not in Path("/proc", pid, "cmdline").read_bytes()

    run_with_sandbox(tmp_path, body)


ESCAPES = {
    "a file of the host": "cat {secret}",
    "a climb": "cat ../../../secret",
    "the caller's process": "kill -0 {pid}",
    "a write beyond its folder": "echo planted > {secret}.planted",
}
STOPPED = {
    "one process's memory": "python3 -c 'bytearray(1 << 30)'",
    "one file's size": "head -c 40000000 /dev/zero > big",
    "a core": "ulimit -c unlimited",
}


def test_what_this_driver_stops_and_what_it_says_it_does_not(tmp_path):
    """If the first list shrinks, the docstring and the label "none" have to change with it."""
    (tmp_path / "secret").write_text("host")
    words = {"secret": tmp_path / "secret", "pid": os.getpid()}

    async def body(driver, sandbox):
        limits = Limits(memory_bytes=256 << 20, disk_bytes=1 << 20)
        other = await driver.create(Image(root=tmp_path / "image"), limits, Net())
        for what, attack in ESCAPES.items():
            assert (await other.exec(sh(attack.format(**words)))).exit_code == 0, what
        for what, attack in STOPPED.items():
            assert (await other.exec(sh(attack))).exit_code != 0, what

    run_with_sandbox(tmp_path, body)
    assert "What it does NOT stop: anything." in process.__doc__


def test_whoever_waits_hears_when_its_sandbox_is_destroyed(tmp_path):
    async def body(driver, sandbox):
        other = await driver.create(Image(root=tmp_path / "image"), Limits(), Net())
        process = await other.start(Command(argv=("sleep", "60"), timeout_s=None))
        waiting = asyncio.create_task(process.wait())
        await asyncio.sleep(0.05)
        await other.destroy()
        assert (await asyncio.wait_for(waiting, 5)).exit_code == 137

    run_with_sandbox(tmp_path, body)


def test_gc_removes_what_a_dead_driver_left(tmp_path):
    async def body(driver, sandbox):
        (driver.root / "deadbeef").mkdir()
        (driver.root / "deadbeef/file").write_text("x")
        lines = await driver.gc()
        assert lines == ["sandbox deadbeef: left behind by an earlier driver"]
        assert sandbox.files.exists()

    run_with_sandbox(tmp_path, body)


def test_refusals_name_the_field(tmp_path):
    async def body(driver, sandbox):
        with pytest.raises(ValueError, match="allowed_hosts"):
            await driver.create(Image(root=tmp_path), Limits(), Net(allowed_hosts=("x",)))
        with pytest.raises(ImageError, match="no such folder"):
            await driver.create(Image(root=tmp_path / "none"), Limits(), Net())
        with pytest.raises(SnapshotError, match="never committed"):
            await driver.restore("0" * 20)
        with pytest.raises(ValueError, match="num_branches=65"):
            await sandbox.fork(65)
        with pytest.raises(ValueError, match="NUL"):
            Command(argv=("a\0b",))
        with pytest.raises(ValueError, match="memory_bytes=0"):
            Limits(memory_bytes=0)
        with pytest.raises(LimitError, match="max_bytes=3"):
            await sandbox.read("hello.txt", max_bytes=3)

    run_with_sandbox(tmp_path, body)
