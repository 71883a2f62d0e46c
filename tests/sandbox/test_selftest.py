"""The self-test and the command line, with the drivers that need nothing."""

import asyncio
import json

import pytest

from baltoro.sandbox.cli import describe, main
from baltoro.sandbox.kvm import probe_kvm
from baltoro.sandbox.protocol import Capabilities
from baltoro.sandbox.selftest import selftest


def test_the_process_driver_keeps_files_and_says_so(tmp_path):
    (result,) = asyncio.run(selftest(tmp_path, ["process"]))
    assert result.is_available
    assert result.isolation == "none"
    assert not result.has_memory_snapshot
    assert {"create", "exec", "snapshot_live", "restore"} <= set(result.latency_ms)


def test_the_zygote_forks_memory_and_keeps_none(tmp_path, capsys):
    (result,) = asyncio.run(selftest(tmp_path, ["zygote"]))
    assert result.is_available, result.reason
    assert result.isolation == "none"
    assert result.has_fork
    assert not result.has_memory_snapshot and not result.has_live_snapshot
    assert not result.has_many_processes
    assert {"create", "exec", "pause", "fork_twice"} <= set(result.latency_ms)
    assert main(["--prefix", str(tmp_path), "selftest", "zygote"]) == 1
    assert "zygote (isolation: none): fork\n" in capsys.readouterr().out


def test_a_driver_without_its_tools_is_reported_with_the_remedy(tmp_path):
    results = asyncio.run(selftest(tmp_path, ["gvisor", "criu", "qemu"]))
    remedy = f"run `baltoro sandbox --prefix {tmp_path} install`"
    for result in results:
        assert not result.is_available
        assert remedy in result.reason or "needs root" in result.reason


def test_firecracker_is_refused_with_all_that_it_lacks(tmp_path, capsys):
    assert main(["--prefix", str(tmp_path), "selftest", "firecracker"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("firecracker: cannot run here: firecracker: no program ")
    assert "no guest kernel" in printed
    is_real, verdict = probe_kvm()
    assert is_real or verdict.split(" takes")[0] in printed.splitlines()[0]


def test_an_unknown_driver_is_refused(tmp_path):
    with pytest.raises(ValueError, match="driver='docker'"):
        asyncio.run(selftest(tmp_path, ["docker"]))


def test_the_verb_fails_when_nothing_keeps_memory(tmp_path, capsys):
    out = tmp_path / "result.json"
    code = main(["--prefix", str(tmp_path), "selftest", "process", "gvisor", "--json", str(out)])
    printed = capsys.readouterr()
    assert code == 1
    assert "no driver keeps memory" in printed.err
    assert "gvisor: cannot run here" in printed.out
    assert [item["driver"] for item in json.loads(out.read_text())] == ["process", "gvisor"]


def test_bad_input_is_one_line_not_a_traceback(tmp_path, capsys):
    assert main(["--prefix", str(tmp_path), "run", "--driver", "docker", "true"]) == 1
    assert "driver='docker'" in capsys.readouterr().err
    assert main(["--prefix", str(tmp_path), "install", "docker"]) == 1
    assert "tools='docker'" in capsys.readouterr().err


def test_a_description_names_what_a_driver_can_do():
    text = describe(
        Capabilities(
            driver="x",
            isolation="namespaces",
            is_available=True,
            has_memory_snapshot=True,
            has_fork=True,
            latency_ms={"fork": 12.5},
        )
    )
    assert text == "x (isolation: namespaces): memory snapshot, fork\n    ms: fork 12.5"


def test_the_kvm_probe_gives_a_verdict_and_its_reason():
    is_real, reason = probe_kvm()
    assert reason.startswith("kvm: ")
    assert is_real == ("takes" in reason and "emulated" not in reason)
