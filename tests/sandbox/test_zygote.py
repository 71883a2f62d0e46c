"""Python programs that split: what branches share, what they do not, and what is refused."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import baltoro.sandbox.zygote as zygote_room
from baltoro.sandbox.protocol import (
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
from baltoro.sandbox.workload import World
from baltoro.sandbox.zygote import REPL, ZygoteDriver, ZygoteProcess, ZygoteSandbox

Body = Callable[[ZygoteDriver, ZygoteSandbox], Awaitable[None]]


def run(folder: Path, body: Body) -> None:
    """`body(driver, sandbox)`; afterwards no program and no folder may be left."""
    image = folder / "image"
    image.mkdir()
    (image / "given").write_text("by the image")

    async def main() -> None:
        store = Store(folder / "store", 1 << 30, is_durable=False)
        driver = ZygoteDriver(folder / "boxes", store)
        try:
            sandbox = await driver.create(Image(root=image), Limits(), Net())
            await body(driver, sandbox)
        finally:
            await driver.close()
            store.close()
        assert os.listdir(driver.root) == []
        server = driver._server
        assert server is None or not is_alive(server.pid)  # and its programs die with it

    asyncio.run(asyncio.wait_for(main(), 60))


def python(text: str, **kwargs: object) -> Command:
    return Command(argv=("python3", "-c", text), **kwargs)  # type: ignore[arg-type]


async def world(sandbox: ZygoteSandbox) -> World:
    """A program that answers each line with its value."""
    argv = ("python3", "-c", REPL)
    return World(await sandbox.start(Command(argv=argv, stdin=None, timeout_s=None)))


def is_alive(process_id: int) -> bool:
    """Not gone, and not a zombie that nobody has collected."""
    try:
        return ") Z" not in Path(f"/proc/{process_id}/stat").read_text()
    except FileNotFoundError:
        return False


def pid(process: ZygoteProcess) -> int:
    return process.child.pid


def test_programs_run_as_under_the_interpreter(tmp_path):
    async def body(driver, sandbox):
        text = "import sys; print(sys.stdin.read(), __name__, sys.argv[1:]); sys.exit(3)"
        result = await sandbox.exec(
            Command(argv=("python3", "-u", "-c", text, "a", "b"), stdin=b"in")
        )
        assert (result.stdout, result.exit_code) == (b"in __main__ ['a', 'b']\n", 3)
        await sandbox.write("tools/helper.py", b"value = 6")
        await sandbox.write("tools/main.py", b"import helper, sys; print(helper.value * 7)")
        script = await sandbox.exec(Command(argv=("python3", "main.py"), cwd="/tools"))
        assert script.stdout == b"42\n"
        failed = await sandbox.exec(python("def f():\n    1 / 0\nf()"))
        assert failed.exit_code == 1
        assert failed.stderr.startswith(b"Traceback") and b"ZeroDivisionError" in failed.stderr
        assert b"zygote" not in failed.stderr
        assert (await sandbox.exec(python("import os; os.kill(os.getpid(), 9)"))).exit_code == 137
        assert (
            await sandbox.exec(python("print(open('given').read())"))
        ).stdout == b"by the image\n"

    run(tmp_path, body)


def test_without_a_program_it_is_a_repl(tmp_path):
    async def body(driver, sandbox):
        lines = b"x = 40\nx + 2\nprint(\n'two lines')\n1 / 0\n'after'\n"
        result = await sandbox.exec(Command(argv=("python3", "-i"), stdin=lines))
        assert result.stdout == b"42\ntwo lines\n'after'\n"
        assert b"ZeroDivisionError" in result.stderr
        assert result.exit_code == 0

    run(tmp_path, body)


def test_branches_go_on_from_one_moment_and_share_no_memory(tmp_path):
    async def body(driver, sandbox):
        origin = await world(sandbox)
        await origin.ask("x = 41")
        await origin.ask("big = os.urandom(20 << 20)")
        digest = await origin.ask("hash(big)")
        branches = await sandbox.fork(3)
        worlds = [await origin.follow(branch) for branch in branches]
        for step, each in enumerate(worlds):
            await each.ask(f"x += {10**step}")
        assert [await each.ask("x") for each in (origin, *worlds)] == ["41", "42", "51", "141"]
        assert {await each.ask("hash(big)") for each in worlds} == {digest}
        assert len({pid(each.process) for each in (origin, *worlds)}) == 4
        draws = {await each.ask("random.random()") for each in (origin, *worlds)}
        assert len(draws) == 4
        (grandchild,) = await branches[1].fork(1)
        assert await (await worlds[1].follow(grandchild)).ask("x") == "51"

    run(tmp_path, body)


def test_files_diverge_also_those_that_are_open(tmp_path):
    async def body(driver, sandbox):
        origin = await world(sandbox)
        await origin.ask("os.mkdir('deep'); os.chdir('deep'); log = open('log', 'w+')")
        await origin.ask("log.write('both '); log.flush()")
        (branch,) = await sandbox.fork(1)
        other = await origin.follow(branch)
        await other.ask("log.write('branch'); log.flush(); open('new', 'w').close()")
        await origin.ask("log.write('origin'); log.flush()")
        assert await sandbox.read("/deep/log") == b"both origin"
        assert await branch.read("/deep/log") == b"both branch"
        assert await branch.read("/deep/new") == b""
        with pytest.raises(FileNotFoundError):
            await sandbox.read("/deep/new")
        assert await other.ask("os.environ['HOME']") == repr(str(branch.files))

    run(tmp_path, body)


def test_what_was_not_yet_written_out_is_in_both(tmp_path):
    """A buffer is memory."""

    async def body(driver, sandbox):
        origin = await world(sandbox)
        await origin.ask("log = open('log', 'w'); log.write('kept')")
        (branch,) = await sandbox.fork(1)
        for each in (origin, await origin.follow(branch)):
            await each.ask("log.close()")
        assert [await box.read("log") for box in (sandbox, branch)] == [b"kept", b"kept"]

    run(tmp_path, body)


def test_a_branch_outlives_its_origin(tmp_path):
    async def body(driver, sandbox):
        origin = await world(sandbox)
        await origin.ask("x = 5")
        (branch,) = await sandbox.fork(1)
        await sandbox.destroy()
        other = await origin.follow(branch)
        assert await other.ask("x") == "5"
        await other.process.write_stdin(b"sys.exit(9)\n")
        assert (await other.process.wait()).exit_code == 9
        assert (await branch.exec(python("print('more')"))).stdout == b"more\n"

    run(tmp_path, body)


def test_a_branch_is_a_whole_program(tmp_path):
    """It may have threads, child processes and forks of its own, and ends as it wants."""

    async def body(driver, sandbox):
        origin = await world(sandbox)
        (branch,) = await sandbox.fork(1)
        other = await origin.follow(branch)
        await other.ask("import atexit, subprocess, threading")
        assert await other.ask("subprocess.run(['echo'], capture_output=True).stdout") == "b'\\n'"
        await other.ask("done = []; t = threading.Thread(target=done.append, args=(1,))")
        await other.ask("t.start(); t.join()")
        assert await other.ask("done, threading.active_count()") == "([1], 1)"
        assert await other.ask("os.waitpid(os.fork() or os._exit(7), 0)[1] >> 8") == "7"
        await other.ask("atexit.register(print, 'last words')")
        await other.process.write_stdin(b"")
        ended = await other.process.wait()
        assert (ended.stdout, ended.exit_code) == (b"last words\n", 0)
        (again,) = await sandbox.fork(1)
        assert await (await origin.follow(again)).ask("'atexit' in names") == "False"

    run(tmp_path, body)


def test_a_paused_sandbox_forks_and_stays_paused(tmp_path):
    async def body(driver, sandbox):
        busy = await sandbox.start(
            python("import time\nwhile True:\n    open('n', 'a').write('.'); time.sleep(0.001)")
        )
        while not (sandbox.files / "n").exists():
            await asyncio.sleep(0.01)
        await sandbox.pause()
        (branch,) = await sandbox.fork(1)
        assert sandbox.state == "paused"
        before = len(await sandbox.read("n"))
        there = len(await branch.read("n"))
        await asyncio.sleep(0.1)
        assert len(await sandbox.read("n")) == before
        assert len(await branch.read("n")) > there
        await sandbox.resume()
        await asyncio.sleep(0.1)
        assert len(await sandbox.read("n")) > before
        await busy.kill()

    run(tmp_path, body)


def test_a_sandbox_without_a_program_forks_its_files(tmp_path):
    async def body(driver, sandbox):
        await sandbox.write("data", b"one")
        (branch,) = await sandbox.fork(1)
        await branch.write("data", b"two")
        assert await sandbox.read("data") == b"one"

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()", "threads"),
        ("import subprocess; child = subprocess.Popen(['sleep', '100'])", "child processes"),
    ],
)
def test_what_a_branch_would_lack_is_refused_and_the_program_goes_on(tmp_path, line, reason):
    async def body(driver, sandbox):
        origin = await world(sandbox)
        await origin.ask(line)
        with pytest.raises(SnapshotError, match=reason):
            await sandbox.fork(2)
        assert await origin.ask("1 + 1") == "2"
        assert os.listdir(driver.root) == [sandbox.id]

    run(tmp_path, body)


def test_two_programs_are_not_of_one_moment(tmp_path):
    async def body(driver, sandbox):
        await world(sandbox)
        await world(sandbox)
        with pytest.raises(SnapshotError, match="2 programs run"):
            await sandbox.fork(1)

    run(tmp_path, body)


def test_a_program_that_keeps_the_signal_to_itself_cannot_be_forked(tmp_path, monkeypatch):
    async def body(driver, sandbox):
        origin = await world(sandbox)
        await origin.ask("import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)")
        monkeypatch.setattr(zygote_room, "ANSWER_TIMEOUT_S", 0.3)  # to begin may take longer
        for _ in range(2):
            with pytest.raises(SnapshotError, match=r"cannot be forked.*SIGUSR1"):
                await sandbox.fork(1)
        assert await origin.ask("1 + 1") == "2"

    run(tmp_path, body)


def test_what_a_zygote_cannot_do_is_said(tmp_path):
    async def body(driver, sandbox):
        with pytest.raises(SnapshotError, match="keeps no memory"):
            await sandbox.snapshot()
        with pytest.raises(SnapshotError, match="has none"):
            await driver.restore("x")
        with pytest.raises(ImageError, match="python3 only"):
            await sandbox.exec(Command(argv=("sh", "-c", "true")))
        with pytest.raises(ImageError, match="no such folder"):
            await sandbox.exec(python("1", cwd="/none"))
        with pytest.raises(ValueError, match="use_pty"):
            await sandbox.exec(python("1", use_pty=True))
        with pytest.raises(ValueError, match="to a file"):
            await sandbox.exec(python("1" * 200_000))
        with pytest.raises(ValueError, match="num_branches=65"):
            await sandbox.fork(65)

    run(tmp_path, body)


def test_time_output_and_memory_are_bounded(tmp_path):
    async def body(driver, sandbox):
        with pytest.raises(LimitError, match="timeout_s"):
            await sandbox.exec(python("while True: pass", timeout_s=0.2))
        small = await driver.create(
            sandbox.image, Limits(max_output_bytes=10_000, memory_bytes=128 << 20), Net()
        )
        with pytest.raises(LimitError, match="max_output_bytes"):
            await small.exec(python("print('x' * 20_000)"))
        hog = await small.exec(python("x = bytearray(1 << 30)"))
        assert b"MemoryError" in hog.stderr

    run(tmp_path, body)


def test_programs_die_with_the_server_and_the_next_has_a_new_one(tmp_path):
    async def body(driver, sandbox):
        origin = await world(sandbox)
        (branch,) = await sandbox.fork(1)
        other = await origin.follow(branch)
        os.kill(driver._server.pid, signal.SIGKILL)
        for each in (origin, other):
            assert (await each.process.wait()).exit_code == 137
            while is_alive(pid(each.process)):
                await asyncio.sleep(0.01)
        assert (await sandbox.exec(python("print(1)"))).stdout == b"1\n"

    run(tmp_path, body)


def test_programs_that_begin_at_once_share_one_server(tmp_path):
    async def body(driver, sandbox):
        results = await asyncio.gather(
            *(sandbox.exec(python("import os; print(os.getppid())")) for _ in range(4))
        )
        assert {int(result.stdout) for result in results} == {driver._server.pid}
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        servers = [
            child
            for child in children.split()
            if b"zygote.py" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        assert servers == [str(driver._server.pid)]

    run(tmp_path, body)


def test_destroy_ends_what_a_program_left_behind(tmp_path):
    async def body(driver, sandbox):
        text = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)"
        left = int((await sandbox.exec(python(text))).stdout)
        assert is_alive(left)
        await sandbox.destroy()
        assert not is_alive(left)
        with pytest.raises(SandboxError, match="destroyed"):
            await sandbox.exec(python("1"))

    run(tmp_path, body)


def test_a_program_can_be_forked_as_soon_as_it_is_there(tmp_path):
    async def body(driver, sandbox):
        for _ in range(20):
            origin = await world(sandbox)
            (branch,) = await sandbox.fork(1)
            assert await (await origin.follow(branch)).ask("2 + 2") == "4"
            await branch.destroy()
            await origin.process.kill()
            await origin.process.wait()

    run(tmp_path, body)


def test_a_signal_that_went_unnoticed_is_sent_again(tmp_path):
    """As Python does not notice one that comes just before a read begins."""

    async def body(driver, sandbox):
        origin = await world(sandbox)
        await origin.ask("import signal; real = signal.getsignal(signal.SIGUSR1)")
        lost = "signal.signal(signal.SIGUSR1, lambda *_: signal.signal(signal.SIGUSR1, real))"
        await origin.ask(f"_ = {lost}")
        (branch,) = await sandbox.fork(1)
        assert await (await origin.follow(branch)).ask("2 + 2") == "4"

    run(tmp_path, body)


def test_sixty_four_branches_answer(tmp_path):
    async def body(driver, sandbox):
        origin = await world(sandbox)
        worlds = [await origin.follow(branch) for branch in await sandbox.fork(64)]
        for step, each in enumerate(worlds):
            await each.ask(f"x = {step}")
        assert [await each.ask("x") for each in worlds] == [str(n) for n in range(64)]

    run(tmp_path, body)
