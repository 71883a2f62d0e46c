"""QEMU's control socket, held by a stand-in that says what QEMU 7.2 says."""

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable

import pytest

import baltoro.sandbox.qmp as qmp_room
from baltoro.sandbox.protocol import SandboxError
from baltoro.sandbox.qmp import Qmp

DONE = {"return": {}}
GREETED = ["qmp_capabilities", "migrate-set-capabilities"]


def event(status: str) -> dict[str, object]:
    return {"event": "MIGRATION", "data": {"status": status}}


class Script:
    """The other end. `said` holds, by command, what is said at each of its calls in turn."""

    def __init__(self, end: socket.socket, said: dict[str, list[list[dict[str, object]]]]):
        self.heard: list[str] = []
        self._end = end
        self._said = said

    def serve(self) -> None:
        self._say({"QMP": {}})
        while True:
            data, files, _, _ = socket.recv_fds(self._end, 65536, 1)
            if not data:
                return
            for fd in files:
                os.write(fd, b"devices")
                os.close(fd)
            command = json.loads(data)["execute"]
            self.heard.append(command)
            turns = self._said.get(command, [])
            for message in turns.pop(0) if turns else [DONE]:
                self._say(message)

    def _say(self, message: dict[str, object]) -> None:
        self._end.sendall(json.dumps(message).encode() + b"\n")


def talk(
    said: dict[str, list[list[dict[str, object]]]], body: Callable[[Qmp], Awaitable[None]]
) -> list[str]:
    """Run `body` against a script; returns the commands that it heard after the greeting."""

    async def main() -> list[str]:
        ours, theirs = socket.socketpair()
        script = Script(theirs, said)
        serving = asyncio.create_task(asyncio.to_thread(script.serve))
        qmp = Qmp(*await asyncio.open_unix_connection(sock=ours))
        try:
            await qmp.negotiate()
            await body(qmp)
        finally:
            await qmp.close()
            await serving
            theirs.close()
        assert script.heard[:2] == GREETED
        return script.heard[2:]

    return asyncio.run(main())


def saving(path) -> Callable[[Qmp], Awaitable[None]]:
    return lambda qmp: qmp.migrate("migrate", os.open(path, os.O_WRONLY | os.O_CREAT))


@pytest.mark.parametrize("num_before", [0, 3], ids=["after the reply", "before the reply"])
def test_devices_are_saved_into_a_passed_file_and_nothing_is_asked_again(tmp_path, num_before):
    """QEMU's threads tell the end whenever it comes."""
    told = [event("setup"), event("active"), event("completed")]
    told.insert(num_before, DONE)
    assert talk({"migrate": [told]}, saving(tmp_path / "device")) == ["getfd", "migrate"]
    assert (tmp_path / "device").read_bytes() == b"devices"


def test_a_saving_that_fails_is_named(tmp_path):
    said = {"migrate": [[DONE, event("setup"), event("failed")]]}
    with pytest.raises(SandboxError, match="qemu migrate failed"):
        talk(said, saving(tmp_path / "device"))


def test_the_end_of_one_saving_is_not_taken_for_that_of_the_next(tmp_path):
    async def twice(qmp: Qmp) -> None:
        await saving(tmp_path / "first")(qmp)
        await saving(tmp_path / "second")(qmp)

    said = {"migrate": [[DONE, event("completed")], [DONE, event("failed")]]}
    with pytest.raises(SandboxError, match="qemu migrate failed"):
        talk(said, twice)


def test_a_machine_waits_for_the_thread_that_saved_it_before_it_goes_on():
    states = [[{"return": {"status": name}}] for name in ("finish-migrate", "postmigrate")]
    heard = talk({"query-status": states}, lambda qmp: qmp.settle())
    assert heard == ["query-status", "query-status"]


def test_a_qemu_that_does_not_answer_is_named(monkeypatch):
    async def stop(qmp: Qmp) -> None:
        monkeypatch.setattr(qmp_room, "REPLY_TIMEOUT_S", 0.05)
        await qmp.run("stop")

    with pytest.raises(SandboxError, match=r"did not answer within 0\.05 s"):
        talk({"stop": [[]]}, stop)
