"""Tools in a prefix: what a machine refuses is named, and does not stop what it allows."""

import pytest

from baltoro.sandbox import install as module
from baltoro.sandbox.cli import main
from baltoro.sandbox.install import Outcome, find_tool, guest_digest, install
from baltoro.sandbox.protocol import DriverUnavailableError, SandboxError


@pytest.fixture
def no_compiler(monkeypatch) -> None:
    """Guest programs that need no compiler."""
    monkeypatch.setattr(module, "_compile_guest", lambda prefix: "compiled")


def lists_from(monkeypatch, folder, address: str) -> None:
    (folder / "sources").write_text(f"deb {address} bookworm main\n")
    monkeypatch.setattr(module, "SEARCHED_SOURCES", (str(folder / "sources"),))


def test_a_guest_program_of_other_sources_is_not_taken_for_ours(tmp_path):
    """What is made of it is kept under the name of our sources."""
    (tmp_path / "guest").mkdir()
    (tmp_path / "guest/agent").touch()
    (tmp_path / "guest/.complete").write_text(guest_digest())
    assert find_tool(tmp_path, "agent") == (str(tmp_path / "guest/agent"),)
    (tmp_path / "guest/.complete").write_text("older")
    with pytest.raises(DriverUnavailableError, match="of other sources; run `baltoro sandbox"):
        find_tool(tmp_path, "agent")


def test_an_archive_that_does_not_answer_refuses_its_tools_only(tmp_path, monkeypatch, no_compiler):
    lists_from(monkeypatch, tmp_path, "file:///no/such/archive")
    outcomes = install(tmp_path / "prefix", ["criu", "guest"])
    assert not outcomes["criu"].is_there
    assert "refused by this machine: no package list of sid" in outcomes["criu"].text
    assert outcomes["guest"] == Outcome(is_there=True, text="compiled")


def test_a_machine_without_apt_refuses(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    lists_from(monkeypatch, tmp_path, "file:///no/such/archive")
    outcome = install(tmp_path / "prefix", ["runsc"])["runsc"]
    assert outcome == Outcome(is_there=False, text="refused by this machine: no apt-get on PATH")


def test_a_package_that_its_suite_lacks_is_our_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_fetch_lists", lambda folder, suite: ["false"])
    with pytest.raises(SandboxError, match="false failed with 1") as caught:
        install(tmp_path, ["criu"])
    assert type(caught.value) is SandboxError


def test_what_is_there_stays_and_an_unknown_name_is_refused(tmp_path):
    (tmp_path / "criu").mkdir()
    (tmp_path / "criu/.complete").touch()
    assert install(tmp_path, ["criu"]) == {"criu": Outcome(is_there=True, text="present")}
    with pytest.raises(ValueError, match="'docker': unknown"):
        install(tmp_path, ["docker"])


def test_the_verb_tells_a_refusal_from_a_failure(tmp_path, monkeypatch, capsys):
    lists_from(monkeypatch, tmp_path, "file:///no/such/archive")
    assert main(["--prefix", str(tmp_path), "install", "criu"]) == 3
    assert "criu: refused by this machine" in capsys.readouterr().out
    monkeypatch.setattr(module, "_fetch_lists", lambda folder, suite: ["false"])
    assert main(["--prefix", str(tmp_path), "install", "criu"]) == 1
