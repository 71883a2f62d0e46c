"""Time what sandboxes are for: create, pause, snapshot, resume to the first answer, fork.

    python bench/sandbox_latency.py [--megabytes 200 20] [--rounds 7] [--drivers criu ...] [--user]
        [--overcommit] [--out FILE]

The world is `baltoro.sandbox.workload`: a Python REPL with a thread, a child on pipes, an open and
a deleted file, loopback TCP and MEGABYTES of random memory; 20 MB make a tree of 28 MiB. Every
round checks the branches before a number counts; a wrong answer ends the run.

What is timed is what a caller sees, from the call to its return: `snapshot` ends with the commit.
`frozen` is the part of it in which programs stood still, `running` the part of a restore after
which they run again; its return (`ready`) waits for the agent to have drawn new randomness.
`fork` is one snapshot and one branch. `process` keeps no memory: its world is files alone.

Images and stores lie in memory, so the disk is not measured: in a tmpfs of huge pages that the
bench mounts if root runs it, else in /dev/shm. `--user` runs as uid 1001, `driver@user` in the
results. A result file is added to: rows of the same driver and size are replaced, so that each
driver can have a quiet moment of its own. The load is recorded beside every row.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from provenance import commit_of

from baltoro.sandbox.criu import Criu
from baltoro.sandbox.gvisor import Gvisor
from baltoro.sandbox.install import default_prefix
from baltoro.sandbox.machine import MachineDriver, MachineSandbox, Mechanism
from baltoro.sandbox.process import ProcessDriver
from baltoro.sandbox.protocol import Command, Image, Limits, Net
from baltoro.sandbox.qemu import Qemu
from baltoro.sandbox.store import Store
from baltoro.sandbox.workload import World

STORE_BYTES = 16 << 30
GUEST_BYTES = 512 << 20  # of an emulated machine
GROUP_BYTES = 1 << 30  # of the others, whose images in memory are charged to who writes them
NUM_OVERCOMMITTED = 12
USER = 1001
OURS = Path(__file__).resolve().parents[1] / "src"
K3 = {"snapshot": 133, "ready": 49}  # of Kimi K3's report, section on AgentENV
COLUMNS = ("create", "pause", "resume", "snapshot", "frozen", "running", "ready", "answer", "fork")


def mechanisms(prefix: Path, folder: Path) -> dict[str, Callable[[], Mechanism]]:
    """By name; `qemu` branches a machine that has booted once, `qemu-boot` boots each."""
    disks = prefix / "disks" if os.access(prefix, os.W_OK) else folder / "disks"
    return {
        "criu": lambda: Criu(prefix),
        "gvisor": lambda: Gvisor(prefix),
        "qemu": lambda: Qemu(prefix, disks, templates=folder / "templates"),
        "qemu-boot": lambda: Qemu(prefix, disks),
    }


class Rounds:
    """Milliseconds by name, one per round."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self._start = 0.0

    def start(self) -> None:
        self._start = time.perf_counter()

    def stop(self, name: str) -> None:
        self.add(name, time.perf_counter() - self._start)

    def add(self, name: str, seconds: float) -> None:
        self.values.setdefault(name, []).append(seconds * 1e3)

    def row(self) -> dict[str, dict[str, float]]:
        p50 = {name: round(statistics.median(all_), 1) for name, all_ in self.values.items()}
        best = {name: round(min(all_), 1) for name, all_ in self.values.items()}
        return {"p50_ms": p50, "best_ms": best}


def limits(driver: MachineDriver) -> Limits:
    return Limits(memory_bytes=GUEST_BYTES if driver.name == "qemu" else GROUP_BYTES)


async def check(world: World, wanted: str) -> None:
    if await world.ask("x") != wanted or await world.ask("whole()") != "True":
        raise SystemExit("the world was not the same: no numbers")


def time_revival(mechanism: Mechanism, rounds: Rounds) -> None:
    """Record when a restored machine's programs run, which is before its driver has greeted it."""
    revive = mechanism.revive

    async def timed(*args: object) -> object:
        machine = await revive(*args)
        rounds.stop("running")
        return machine

    mechanism.revive = timed


async def one_round(driver: MachineDriver, image: Image, megabytes: int, rounds: Rounds) -> None:
    rounds.start()
    sandbox = await driver.create(image, limits(driver), Net())
    rounds.stop("create")
    world = await World.start(sandbox, megabytes)
    await world.ask("x = 41")
    rounds.start()
    await sandbox.pause()
    rounds.stop("pause")
    rounds.start()
    await sandbox.resume()
    rounds.stop("resume")
    rounds.start()
    snapshot = await sandbox.snapshot()
    rounds.stop("snapshot")
    rounds.add("frozen", sandbox.frozen_s)
    await check(world, "41")
    branches = []
    for _ in range(2):
        rounds.start()
        (branch,) = await driver.restore(snapshot)
        rounds.stop("ready")
        answer = await (await world.follow(branch)).ask("x")
        rounds.stop("answer")
        if answer != "41":
            raise SystemExit("the world was not the same: no numbers")
        branches.append(branch)
    await check(await world.follow(branches[0]), "41")
    num_revived = len(rounds.values["running"])
    rounds.start()
    (forked,) = await branches[0].fork(1)
    rounds.stop("fork")
    del rounds.values["running"][num_revived:]  # from the call of `fork`, not of a restore
    if await (await world.follow(forked)).ask("x") != "41":
        raise SystemExit("the world was not the same: no numbers")
    for each in (*branches, forked):
        await each.destroy()
    rounds.start()
    await sandbox.destroy()
    rounds.stop("destroy")
    for snapshot in driver.store.ids():
        driver.store.delete(snapshot)


async def measure(
    mechanism: Mechanism, folder: Path, image: Image, megabytes: int, num: int
) -> Rounds:
    store = Store(folder / "store", STORE_BYTES, is_durable=False)
    driver = MachineDriver(mechanism, folder / "boxes", store)
    rounds = Rounds()
    time_revival(mechanism, rounds)
    try:
        if num > 0:  # what only the first one pays: disks, templates, probes of the kernel
            warm = await driver.create(image, limits(driver), Net())
            await warm.exec(Command(argv=("python3", "-c", "1")))
            await warm.destroy()
        for _ in range(num):
            await one_round(driver, image, megabytes, rounds)
    finally:
        await driver.close()
        store.close()
    return rounds


async def measure_process(folder: Path, megabytes: int, num: int) -> Rounds:
    """Files instead of memory: as many megabytes of them."""
    store = Store(folder / "store", STORE_BYTES, is_durable=False)
    driver = ProcessDriver(folder / "boxes", store)
    rounds = Rounds()
    (folder / "image").mkdir()
    data = os.urandom(megabytes << 20)
    try:
        for _ in range(num):
            rounds.start()
            sandbox = await driver.create(Image(root=folder / "image"), Limits(), Net())
            rounds.stop("create")
            await sandbox.write("/data", data)
            sleeper = await sandbox.start(Command(argv=("sleep", "1000"), timeout_s=None))
            for verb in ("pause", "resume"):
                rounds.start()
                await getattr(sandbox, verb)()
                rounds.stop(verb)
            rounds.start()
            snapshot = await sandbox.snapshot()
            rounds.stop("snapshot")
            rounds.add("frozen", sandbox.frozen_s)
            rounds.start()
            (branch,) = await driver.restore(snapshot)
            rounds.stop("ready")
            answer = await branch.exec(Command(argv=("echo", "41")))
            rounds.stop("answer")
            if answer.stdout != b"41\n" or await branch.read("/data", len(data)) != data:
                raise SystemExit("the files were not the same: no numbers")
            rounds.start()
            (forked,) = await branch.fork(1)
            rounds.stop("fork")
            await sleeper.kill()
            for each in (sandbox, branch, forked):
                await each.destroy()
            for snapshot in store.ids():
                store.delete(snapshot)
    finally:
        await driver.close()
        store.close()
    return rounds


def private_mb(branches: list[MachineSandbox]) -> float:
    """Memory that the QEMUs of branches have each to themselves."""
    total_kb = 0
    for branch in branches:
        pid = int((branch.home / "pid").read_text())
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Private_Dirty"):
                total_kb += int(line.split()[1])
    return total_kb / 1024


async def overcommit(mechanism: Mechanism, folder: Path, image: Image) -> dict[str, float]:
    """Twelve branches of one frozen machine: memory they would have alone, over what they use."""
    store = Store(folder / "store", STORE_BYTES, is_durable=False)
    driver = MachineDriver(mechanism, folder / "boxes", store)
    try:
        sandbox = await driver.create(image, limits(driver), Net())
        world = await World.start(sandbox, 200)
        await world.ask("x = 1")
        snapshot = await sandbox.snapshot(mode="stop")
        base_mb = store.usage().stored_bytes / 2**20
        rounds = Rounds()
        rounds.start()
        branches = await driver.restore(snapshot, NUM_OVERCOMMITTED)
        rounds.stop("all_up")
        followers = [await world.follow(branch) for branch in branches]
        for index, follower in enumerate(followers):
            await follower.ask(f"x = {index}")
            if await follower.ask("x") != str(index):
                raise SystemExit("the branches are not independent: no numbers")
        answered_mb = private_mb(branches)
        for index, follower in enumerate(followers):
            await check(follower, str(index))
        checked_mb = private_mb(branches)
        alone_mb = NUM_OVERCOMMITTED * base_mb
        nominal_mb = NUM_OVERCOMMITTED * GUEST_BYTES / 2**20
        return {
            "num_branches": NUM_OVERCOMMITTED,
            "all_up_ms": rounds.row()["p50_ms"]["all_up"],
            "base_resident_mb": round(base_mb, 1),
            "private_after_answer_mb": round(answered_mb, 1),
            "private_after_whole_check_mb": round(checked_mb, 1),
            "factor_after_answer": round(alone_mb / (base_mb + answered_mb), 2),
            "factor_after_whole_check": round(alone_mb / (base_mb + checked_mb), 2),
            "factor_against_configured": round(nominal_mb / (base_mb + checked_mb), 2),
        }
    finally:
        await driver.close()
        store.close()


@contextlib.contextmanager
def memory_folder() -> Iterator[tuple[Path, str]]:
    """A folder in memory, and what it is."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as name:
        folder = Path(name)
        folder.chmod(0o755)
        if os.geteuid() != 0:
            yield folder, "tmpfs"
            return
        mount = ["mount", "-t", "tmpfs", "-o", f"huge=within_size,mode=755,size={STORE_BYTES}"]
        subprocess.run([*mount, "tmpfs", name], check=True)
        try:
            yield folder, "tmpfs, huge=within_size"
        finally:
            subprocess.run(["umount", name], check=True)


def as_user(words: list[str]) -> list[str]:
    """The command line that runs this interpreter as an ordinary user, who sees it if root does."""
    home = Path(sys.executable).resolve().parents[3]
    script = 'exec setpriv --reuid="$0" --regid="$0" --clear-groups "$@"'
    if home.is_relative_to("/root"):
        script = (
            f'mount --bind "{home}" /mnt && mount -t tmpfs -o mode=755 tmpfs /root'
            f' && mkdir -p "{home}" && mount --move /mnt "{home}" && {script}'
        )
    return ["unshare", "-m", "sh", "-c", script, str(USER), sys.executable, *words]


def merge(path: Path, report: Mapping[str, object], rows: list[dict[str, Any]]) -> None:
    """Put rows into a result file beside those of other drivers and sizes."""
    old = json.loads(path.read_text()) if path.exists() else {"results": []}
    new = {(row["driver"], row["megabytes"]) for row in rows}
    kept = [row for row in old["results"] if (row["driver"], row["megabytes"]) not in new]
    order = sorted(kept + rows, key=lambda row: (row["driver"], -row["megabytes"]))
    old.pop("results")
    path.write_text(json.dumps({**old, **report, "results": order}, indent=2) + "\n")


def table(report: dict[str, Any]) -> str:
    """All rows of a result file beside what K3 reports."""
    lines = [f"{'p50 ms':22}" + "".join(f"{name:>10}" for name in COLUMNS)]
    rows = [(f"{r['driver']} {r['megabytes']} MB", r["p50_ms"]) for r in report["results"]]
    for name, values in [*rows, ("K3 (report)", K3)]:
        cells = (f"{values[column]:10.1f}" if column in values else " " * 10 for column in COLUMNS)
        lines.append(f"{name:22}" + "".join(cells))
    if "overcommit" in report:
        lines.append(f"overcommit of QEMU branches (K3: up to 6.5): {report['overcommit']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", type=Path, default=default_prefix())
    parser.add_argument("--megabytes", type=int, nargs="+", default=[200, 20])
    parser.add_argument("--rounds", type=int, default=7)
    names = ["process", "gvisor", "criu", "qemu", "qemu-boot"]
    parser.add_argument("--drivers", nargs="*", default=names, choices=names)
    parser.add_argument("--user", action="store_true", help=f"as uid {USER} (needs root)")
    parser.add_argument("--overcommit", action="store_true")
    parser.add_argument("--note", default="", help="kept in every row: what else was running")
    parser.add_argument("--commit", help="of the code, for a user who cannot ask git")
    parser.add_argument("--out", type=Path, default=Path("bench/results/sandbox_latency.json"))
    options = parser.parse_args()
    if options.user:
        words = [word for word in sys.argv if word != "--user"]
        with tempfile.TemporaryDirectory(prefix="bench-user-", dir="/dev/shm") as home:
            os.chown(home, USER, USER)
            out = Path(home, "out.json")
            words += [
                "--prefix",
                str(options.prefix),
                "--commit",
                commit_of(options.commit),
                "--out",
                str(out),
            ]
            environment = {"PYTHONPATH": str(OURS), "PATH": os.defpath, "HOME": home}
            subprocess.run(as_user(words), env=environment, check=True, stdout=subprocess.DEVNULL)
            merge(options.out, {}, json.loads(out.read_text())["results"])
    else:
        run(options)
    print(table(json.loads(options.out.read_text())))


def run(options: argparse.Namespace) -> None:
    image = Image(root=options.prefix / "image/root")
    where = {"kernel": platform.release(), "cores": os.cpu_count()}
    suffix = "" if os.geteuid() == 0 else "@user"
    for name in options.drivers:
        for megabytes in options.megabytes:
            load = round(os.getloadavg()[0], 1)
            with memory_folder() as (folder, kind):
                if name == "process":
                    rounds = asyncio.run(measure_process(folder, megabytes, options.rounds))
                else:
                    mechanism = mechanisms(options.prefix, folder)[name]()
                    work = measure(mechanism, folder, image, megabytes, options.rounds)
                    rounds = asyncio.run(work)
            row = {
                "driver": name + suffix,
                "megabytes": megabytes,
                "commit": commit_of(options.commit),
            }
            row |= {"rounds": options.rounds, "images": kind, "note": options.note}
            row |= {"load_before": load, "load_after": round(os.getloadavg()[0], 1)}
            merge(options.out, where, [{**row, **rounds.row()}])
    if options.overcommit:
        with memory_folder() as (folder, _):
            mechanism = mechanisms(options.prefix, folder)["qemu-boot"]()
            factors = asyncio.run(overcommit(mechanism, folder, image))
        factors["load_after"] = round(os.getloadavg()[0], 1)
        merge(options.out, {**where, "overcommit": factors}, [])


if __name__ == "__main__":
    main()
