"""Firecracker's driver against a strict stand-in for its API (`fake_firecracker.py`); no KVM."""

import os
import shutil
from pathlib import Path

import pytest
from sandbox.firecracker_site import Site, add, counter, make_tools, run

import baltoro.sandbox.firecracker as firecracker_room
from baltoro.sandbox.firecracker import Firecracker, merge_diff
from baltoro.sandbox.machine import MachineDriver
from baltoro.sandbox.protocol import (
    Command,
    DriverUnavailableError,
    ImageError,
    LimitError,
    Limits,
    Net,
    SandboxError,
    SnapshotError,
)
from baltoro.sandbox.store import Store

BOOT = [
    "PUT /machine-config",
    "PUT /boot-source",
    "PUT /drives/image",
    "PUT /vsock",
    "PUT /actions",
]
PAUSE, CREATE, LOAD = "PATCH /vm", "PUT /snapshot/create", "PUT /snapshot/load"


@pytest.fixture(scope="module")
def tools(tmp_path_factory) -> Path:
    prefix = tmp_path_factory.mktemp("tools")
    make_tools(prefix)
    return prefix


def test_a_boot_is_these_calls_in_this_order_with_these_bodies(tools, tmp_path):
    async def body(site):
        sandbox = await site.create()
        calls = site.calls(sandbox)
        assert [call["call"] for call in calls] == BOOT
        assert {call["status"] for call in calls} == {204}
        machine, source, disk, vsock, action = (call["body"] for call in calls)
        assert machine == {"vcpu_count": 2, "mem_size_mib": 96, "track_dirty_pages": True}
        assert source["kernel_image_path"] == str(site.binary.parent / "vmlinux")
        words = source["boot_args"].split()
        assert {"vsock_port=52", f"disk_bytes={32 << 20}", "max_pids=336", "reboot=k"} <= set(words)
        assert disk["is_read_only"] and not disk["is_root_device"]
        assert vsock == {"guest_cid": 3, "uds_path": "vsock"}
        assert action == {"action_type": "InstanceStart"}
        assert "/network-interfaces" not in str(calls)

    run(tools, tmp_path, body)


def test_files_and_programs_work_through_the_vsock(tools, tmp_path):
    async def body(site):
        sandbox = await site.create()
        data = os.urandom(300_000)
        await sandbox.write("/work/data", data)
        assert await sandbox.read("/work/data") == data
        with pytest.raises(FileNotFoundError):
            await sandbox.read("/work/none")
        with pytest.raises(ImageError, match="lacks it"):
            await sandbox.exec(Command(argv=("sh",)))
        process = await counter(sandbox)
        assert [await add(process, 40), await add(process, 2)] == [40, 42]

    run(tools, tmp_path, body)


def test_pause_and_resume_are_idempotent_and_keep_the_connection(tools, tmp_path):
    async def body(site):
        sandbox = await site.create()
        process = await counter(sandbox)
        await sandbox.pause()
        await sandbox.pause()
        with pytest.raises(SandboxError, match="paused"):
            await sandbox.read("/x")
        await sandbox.resume()
        assert await add(process, 1) == 1
        states = [call["body"].get("state") for call in site.calls(sandbox)[len(BOOT) :]]
        assert states == ["Paused", "Resumed"]

    run(tools, tmp_path, body)


def test_a_first_snapshot_is_full_and_later_ones_are_what_changed(tools, tmp_path):
    """Each is whole: any of them wakes without the others, packed or not."""

    async def body(site):
        sandbox = await site.create()
        process = await counter(sandbox)
        await sandbox.write("/old", b"o" * 50_000)
        snapshots = []
        for number in (1, 2, 3):
            await add(process, number)
            await sandbox.write(f"/file{number}", bytes([number]) * 9000)
            snapshots.append(await sandbox.snapshot())
        bodies = [call["body"] for call in site.calls(sandbox) if call["call"] == CREATE]
        assert [each["snapshot_type"] for each in bodies] == ["Full", "Diff", "Diff"]
        assert site.names(sandbox)[len(BOOT) :] == [PAUSE, CREATE, PAUSE] * 3
        site.store.delete(snapshots[0])
        site.store.pack(snapshots[2])
        site.store.delete(snapshots[1])
        (again,) = await site.driver.restore(snapshots[2])
        assert await add(await again.attach(process.id), 10) == 16
        assert await again.read("/old") == b"o" * 50_000
        for number in (1, 2, 3):
            assert await again.read(f"/file{number}") == bytes([number]) * 9000

    run(tools, tmp_path, body)


def test_the_connection_is_closed_before_a_snapshot_and_met_again_after(tools, tmp_path):
    """The fake cuts the first that comes after: only one on which the agent answered counts."""

    async def body(site):
        sandbox = await site.create()
        process = await counter(sandbox)
        await sandbox.snapshot()
        (create,) = [call for call in site.calls(sandbox) if call["call"] == CREATE]
        assert create["open"] == 0
        assert await add(process, 5) == 5

    run(tools, tmp_path, body)


def test_a_load_is_the_first_call_of_a_fresh_process_and_maps_a_file_of_its_own(tools, tmp_path):
    async def body(site):
        sandbox = await site.create()
        (branch,) = await sandbox.fork(1)
        load, resume = site.calls(branch)
        assert (load["call"], resume["body"]) == (LOAD, {"state": "Resumed"})
        backend = load["body"]["mem_backend"]
        assert backend["backend_type"] == "File"
        assert Path(backend["backend_path"]) == branch.home / "ram"
        assert load["body"]["enable_diff_snapshots"] is True
        assert load["body"]["resume_vm"] is False

    run(tools, tmp_path, body)


def test_branches_share_the_memory_file_and_nothing_else(tools, tmp_path):
    async def body(site):
        sandbox = await site.create()
        process = await counter(sandbox)
        await add(process, 41)
        await sandbox.write("/log", b"origin")
        snapshot = await sandbox.snapshot()
        left, right = await site.driver.restore(snapshot, 2)
        inodes = {(box.home / "ram").stat().st_ino for box in (sandbox, left, right)}
        assert len(inodes) == 1
        before = (left.home / "ram").read_bytes()
        counters = [await box.attach(process.id) for box in (left, right)]
        assert [await add(each, n) for each, n in zip(counters, (1, 1000), strict=True)] == [
            42,
            1041,
        ]
        await left.write("/log", b"left")
        assert await add(process, 0) == 41
        assert [await box.read("/log") for box in (sandbox, left, right)] == [
            b"origin",
            b"left",
            b"origin",
        ]
        assert (left.home / "ram").read_bytes() == before
        (grandchild,) = await left.fork(1)
        assert await add(await grandchild.attach(process.id), 0) == 42
        assert await grandchild.read("/log") == b"left"
        kinds = [call["body"].get("snapshot_type") for call in site.calls(left)]
        assert kinds[-2:] == ["Diff", None]

    run(tools, tmp_path, body)


def test_a_paused_sandbox_forks_twice_and_stays_paused(tools, tmp_path):
    async def body(site):
        sandbox = await site.create()
        process = await counter(sandbox)
        await add(process, 1)
        await sandbox.pause()
        branches = [*await sandbox.fork(1), *await sandbox.fork(1)]
        assert sandbox.state == "paused"
        for branch in branches:
            assert await add(await branch.attach(process.id), 1) == 2
        await sandbox.resume()
        assert await add(process, 10) == 11

    run(tools, tmp_path, body)


def test_a_stopped_sandbox_wakes_under_another_root(tools, tmp_path):
    """As on another host: disk and socket are found where the new process runs."""

    async def body(site):
        sandbox = await site.create()
        process = await counter(sandbox)
        await add(process, 7)
        snapshot = await sandbox.snapshot(mode="stop")
        assert sandbox.state == "destroyed"
        assert site.names(sandbox)[len(BOOT) :] == [PAUSE, CREATE]
        site.store.pack(snapshot)
        away = site.folder / "away"
        shutil.copytree(site.store.root, away / "store")
        site.store.delete(snapshot)
        store = Store(away / "store", 4 << 30, is_durable=False)
        other = MachineDriver(site.mechanism(), away / "boxes", store)
        try:
            (again,) = await other.restore(snapshot)
            assert await add(await again.attach(process.id), 1) == 8
        finally:
            await other.close()
            store.close()

    run(tools, tmp_path, body)


def test_with_templates_a_machine_boots_once_and_first_snapshots_are_diffs(tools, tmp_path):
    async def body(site):
        site.driver.mechanism = site.mechanism(site.folder / "templates")
        first, second = await site.create(), await site.create()
        assert site.names(first) == [*BOOT, PAUSE, CREATE, LOAD, PAUSE]
        assert site.names(second) == [LOAD, PAUSE]
        counters = [await counter(box) for box in (first, second)]
        assert [await add(counters[0], 1), await add(counters[1], 2)] == [1, 2]
        (branch,) = await second.fork(1)
        assert site.calls(second)[-2]["body"]["snapshot_type"] == "Diff"
        assert await add(await branch.attach(counters[1].id), 0) == 2
        await site.driver.create(site.image, Limits(memory_bytes=100 << 20), Net())
        assert len(os.listdir(site.folder / "templates")) == 2

    run(tools, tmp_path, body)


def test_sixteen_branches_answer(tools, tmp_path):
    async def body(site):
        sandbox = await site.create()
        process = await counter(sandbox)
        branches = await sandbox.fork(16)
        counters = [await branch.attach(process.id) for branch in branches]
        assert [await add(each, n) for n, each in enumerate(counters)] == list(range(16))

    run(tools, tmp_path, body)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/machine-config", LimitError),
        ("/boot-source", DriverUnavailableError),
        ("/drives/image", ImageError),
        ("/actions", DriverUnavailableError),
    ],
)
def test_a_refused_boot_says_what_was_refused_and_what_to_do(tools, tmp_path, path, kind):
    async def body(site):
        site.behave(refuse={path: "Because."})
        with pytest.raises(kind, match=rf"refused PUT {path}: Because\.; \w+") as caught:
            await site.create()
        assert type(caught.value) is kind
        assert os.listdir(site.driver.root) == []

    run(tools, tmp_path, body)


def test_more_processors_than_it_knows_are_refused_not_cut(tools, tmp_path):
    async def body(site):
        with pytest.raises(LimitError, match=r"1 to 32.*lower limits"):
            await site.driver.create(site.image, Limits(cpus=33.0), Net())

    run(tools, tmp_path, body)


def test_a_refused_snapshot_leaves_a_sandbox_that_goes_on(tools, tmp_path):
    """The one after it is a full one: nobody knows which pages the failed one has forgotten."""

    async def body(site):
        sandbox = await site.create()
        process = await counter(sandbox)
        await sandbox.snapshot()
        await add(process, 3)
        device = sandbox.machine._vmm._runtime / "api"
        assert device.exists()
        whole = site.store.begin()
        os.rmdir(whole.memory)  # the fake cannot write there
        with pytest.raises(SnapshotError, match=r"No such file.*is there room"):
            await sandbox.machine.channel.quiet()
            await sandbox.machine.dump(whole, is_frozen=False, is_last=False)
        await sandbox.machine.channel.go_on()
        assert await add(process, 4) == 7
        snapshot = await sandbox.snapshot()
        kinds = [
            call["body"]["snapshot_type"] for call in site.calls(sandbox) if CREATE in str(call)
        ]
        assert kinds == ["Full", "Diff", "Full"]
        (branch,) = await site.driver.restore(snapshot)
        assert await add(await branch.attach(process.id), 0) == 7

    run(tools, tmp_path, body)


def test_a_damaged_snapshot_is_named_and_leaves_nothing(tools, tmp_path):
    async def body(site):
        sandbox = await site.create()
        snapshot = await sandbox.snapshot()
        device = site.store.memory_path(snapshot) / "device"
        device.write_bytes(device.read_bytes()[:-1] + b"?")
        with pytest.raises(SnapshotError, match="CRC64 validation failed; restore it where"):
            await site.driver.restore(snapshot)
        assert os.listdir(site.driver.root) == [sandbox.id]

    run(tools, tmp_path, body)


def test_a_snapshot_of_another_release_is_refused_before_it_is_loaded(tools, tmp_path):
    async def body(site):
        sandbox = await site.create()
        snapshot = await sandbox.snapshot()
        site.behave(version="1.11.0")
        site.driver.mechanism = site.mechanism()
        with pytest.raises(
            SnapshotError, match=r"driver_version was '1.10.1', here it is '1.11.0'"
        ):
            await site.driver.restore(snapshot)

    run(tools, tmp_path, body)


def test_a_panic_is_told_with_the_end_of_the_console(tools, tmp_path):
    async def body(site):
        site.behave(boot="panic")
        with pytest.raises(ImageError, match=r"(?s)did not boot.*Kernel panic"):
            await site.create()

    run(tools, tmp_path, body)


def test_the_watchdog_ends_a_boot_that_hangs(tools, tmp_path, monkeypatch):
    monkeypatch.setattr(firecracker_room, "BOOT_TIMEOUT_S", 0.5)

    async def body(site):
        site.behave(boot="hang")
        with pytest.raises(ImageError, match=r"did not boot within 0\.5 s"):
            await site.create()

    run(tools, tmp_path, body)


def test_a_killed_machine_is_noticed_by_who_waits(tools, tmp_path):
    async def body(site):
        sandbox = await site.create()
        process = await counter(sandbox)
        os.kill(int((sandbox.home / "pid").read_text()), 9)
        with pytest.raises(SandboxError, match="gone"):
            await process.wait()
        with pytest.raises(SandboxError):
            await sandbox.snapshot()
        await sandbox.destroy()

    run(tools, tmp_path, body)


def test_what_a_dead_owner_left_is_swept(tools, tmp_path):
    async def body(site):
        sandbox = await site.create()
        runtime = Path((sandbox.home / "runtime").read_text())
        assert {"api", "vsock", "disk"} <= set(os.listdir(runtime))
        other = MachineDriver(site.mechanism(), site.driver.root, site.store)
        assert await other.gc() == [f"sandbox {sandbox.id}: left behind by an earlier driver"]
        assert not runtime.exists()
        sandbox.home.mkdir()  # for the end of the first

    run(tools, tmp_path, body)


def test_all_that_is_missing_is_said_at_once(tmp_path):
    with pytest.raises(DriverUnavailableError) as caught:
        Firecracker(tmp_path, tmp_path / "disks", probe=lambda: (False, "kvm: it is emulated"))
    for reason in ("no program", "no guest kernel", "kvm: it is emulated"):
        assert reason in str(caught.value)


def test_a_real_kvm_is_demanded_even_with_binary_and_kernel(tools, tmp_path):
    site = Site(tools, tmp_path)
    with pytest.raises(DriverUnavailableError, match=r"^firecracker: kvm: no /dev/kvm$"):
        Firecracker(site.prefix, tmp_path, probe=lambda: (False, "kvm: no /dev/kvm"))


@pytest.mark.parametrize("version", ["1.9.1", "1.16.0"])
def test_releases_whose_connections_do_not_outlive_a_snapshot_are_refused(tools, tmp_path, version):
    async def body(site):
        site.behave(version=version)
        with pytest.raises(
            DriverUnavailableError, match=rf"{version}.*at least 1\.10\.0 there, not"
        ):
            await site.create()

    run(tools, tmp_path, body)


def test_a_diff_goes_over_its_base_where_it_has_data_and_only_there(tmp_path):
    base, diff, whole = (tmp_path / name for name in ("base", "diff", "whole"))
    page = 4096
    base.write_bytes(b"a" * page * 8)
    with diff.open("wb") as out:
        out.truncate(page * 8)
        for at, letter in ((1, b"b"), (6, b"\0")):  # a page that became zero is data too
            out.seek(at * page)
            out.write(letter * page)
    merge_diff(base, diff, whole)
    data = whole.read_bytes()
    letters = [data[at * page : at * page + 1] for at in range(8)]
    assert b"".join(letters) == b"abaaaa\0a"
    assert base.read_bytes() == b"a" * page * 8
    diff.write_bytes(b"x")
    with pytest.raises(SnapshotError, match="a diff of 1 bytes"):
        merge_diff(base, diff, whole)
