"""The server for E2B's clients over the process driver, spoken to without their package.

`tests/interop/test_e2b.py` runs the package itself against it.
"""

import asyncio
import base64
import contextlib
import gzip
import hashlib
import subprocess
import time

import pytest
from sandbox.e2b_http import PNG, Box, new, serve

from baltoro.sandbox.cli import main
from baltoro.sandbox.e2b.server import ServerConfig
from baltoro.sandbox.protocol import Image, Limits, Net, SandboxError


def test_commands_stream_their_output_and_their_end(tmp_path):
    async def body(http, control):
        box = await new(http, envVars={"X": "1"})
        assert await box.run('echo "$X"; echo err >&2; exit 3') == (b"1\nerr\n", 3)
        _, error = await box.stream(
            "process.Process/Start",
            {"process": {"cmd": "sleep", "args": ["60"]}},
            **{"connect-timeout-ms": "100"},
        )
        assert error["code"] == "deadline_exceeded"
        _, error = await box.stream("process.Process/Start", {"process": {"cmd": "no-such"}})
        assert error["code"] == "invalid_argument"
        _, error = await box.stream("process.Process/Start", {"process": {}})
        assert "needs a program" in error["message"]

    serve(tmp_path, body)


def test_a_command_is_found_fed_and_ended_by_its_id_or_tag(tmp_path):
    async def body(http, control):
        box = await new(http)
        start = {"process": {"cmd": "cat"}, "tag": "t", "stdin": True}
        task = asyncio.create_task(box.stream("process.Process/Start", start))
        while not (listed := (await box.call("process.Process/List", {}))["processes"]):
            await asyncio.sleep(0.01)
        assert listed[0]["tag"] == "t"
        pid = {"process": {"pid": listed[0]["pid"]}}
        one, two = (base64.b64encode(text).decode() for text in (b"one ", b"two"))
        await box.call("process.Process/SendInput", pid | {"input": {"stdin": one}})
        data = {"data": {"input": {"stdin": two}}}
        assert await box.stream(
            "process.Process/StreamInput", {"start": {"process": {"tag": "t"}}}, data
        ) == ([{}], None)
        await box.call("process.Process/CloseStdin", {"process": {"tag": "t"}})
        events, _ = await task
        pieces = [each["event"]["data"]["stdout"] for each in events if "data" in each["event"]]
        assert b"".join(map(base64.b64decode, pieces)) == b"one two"
        await box.call("process.Process/SendSignal", pid | {"signal": "SIGNAL_SIGKILL"}, status=404)
        await box.call("process.Process/Update", pid, status=404)

    serve(tmp_path, body)


def test_a_second_listener_hears_the_end_that_a_signal_brings(tmp_path):
    async def body(http, control):
        box = await new(http)
        start = {"process": {"cmd": "sleep", "args": ["60"]}, "tag": "s"}
        first = asyncio.create_task(box.stream("process.Process/Start", start))
        who = {"process": {"tag": "s"}}
        while not (await box.call("process.Process/List", {}))["processes"]:
            await asyncio.sleep(0.01)
        ping = {"keepalive-ping-interval": "1"}
        second = asyncio.create_task(box.stream("process.Process/Connect", who, **ping))
        await asyncio.sleep(1.1)
        await box.call("process.Process/SendSignal", who | {"signal": "SIGNAL_SIGHUP"}, status=400)
        await box.call("process.Process/SendSignal", who | {"signal": "SIGNAL_SIGTERM"})
        for task in (first, second):
            events, _ = await task
            assert events[-1]["event"]["end"]["exitCode"] == 143
        assert {"event": {"keepalive": {}}} in (await second)[0]

    serve(tmp_path, body)


def test_bytes_pass_unchanged_in_every_form_of_a_transfer(tmp_path):
    async def body(http, control):
        box = await new(http)
        data = PNG + bytes(range(256)) * 40
        assert (await box.put("a/pic.png", data)).json() == [
            {"name": "pic.png", "type": "file", "path": "/a/pic.png"}
        ]
        assert (await box.get("/a/pic.png")).content == data
        packed = {**box.headers, "content-encoding": "gzip"}
        await http.post("/files?path=b", content=gzip.compress(data), headers=packed)
        assert (await box.get("b")).content == data
        form = [("file", ("c/one", data)), ("file", ("/two", b"2"))]
        reply = await http.post("/files", files=form, headers=box.headers)
        assert [each["path"] for each in reply.json()] == ["/c/one", "/two"]
        assert (await box.get("c/one")).content == data
        for content in (b"no gzip", gzip.compress(data)[:-9]):
            assert (
                await http.post("/files?path=d", content=content, headers=packed)
            ).status_code == 400

    serve(tmp_path, body)


def test_no_path_of_a_client_leaves_the_sandbox(tmp_path):
    async def body(http, control):
        box = await new(http)
        secret = tmp_path / "secret"
        secret.write_text("host")
        for path in (f"../../../..{secret}", str(secret), "~/../../secret"):
            assert (await box.get(path)).status_code == 404
            await box.call("filesystem.Filesystem/Stat", {"path": path}, status=404)
        await box.run(f"ln -s {tmp_path} out; ln -s ../../.. up")
        assert (await box.get("out/secret")).status_code == 404
        assert (await box.get("up/secret")).status_code == 404
        await box.put("../../../up/planted", b"x")
        assert not list(tmp_path.glob("planted"))
        await box.call("filesystem.Filesystem/Remove", {"path": "../.."}, status=400)
        assert secret.read_text() == "host"

    serve(tmp_path, body)


def test_too_large_a_file_is_refused_both_ways(tmp_path):
    async def body(http, control):
        box = await new(http)
        assert (await box.put("a", b"x" * 101)).status_code == 507
        packed = {**box.headers, "content-encoding": "gzip"}
        bomb = gzip.compress(b"\0" * 10_000_000)
        assert (await http.post("/files?path=a", content=bomb, headers=packed)).status_code == 507
        assert (
            await http.post("/files", files={"file": ("a", b"x" * 101)}, headers=box.headers)
        ).status_code == 507

        async def endless():
            yield b"--x\r\n"

        form = box.headers | {"content-type": "multipart/form-data; boundary=x"}
        reply = await http.post("/files", content=endless(), headers=form)
        assert "content-length" in reply.json()["message"]
        await box.run("head -c 101 /dev/zero > b")
        assert (await box.get("b")).status_code == 507

    serve(tmp_path, body, ServerConfig(max_file_bytes=100))


def test_folders_are_listed_made_moved_and_removed(tmp_path):
    async def body(http, control):
        box = await new(http)
        name = "filesystem.Filesystem/"
        await box.put("d/e/f g\n", b"12")
        await box.run("ln -s d link; ln -s nowhere broken")
        listed = (await box.call(name + "ListDir", {"path": "/", "depth": 3}))["entries"]
        assert [each["path"] for each in listed] == ["/broken", "/d", "/d/e", "/d/e/f g\n", "/link"]
        entry = listed[3]
        assert (entry["name"], entry["size"], entry["permissions"]) == ("f g\n", "2", "-rw-r--r--")
        link = listed[4]
        assert (link["type"], link["symlinkTarget"]) == ("FILE_TYPE_DIRECTORY", "d")
        assert len((await box.call(name + "ListDir", {"path": "link"}))["entries"]) == 1
        await box.call(name + "MakeDir", {"path": "d/new/er"})
        await box.call(name + "MakeDir", {"path": "d/new/er"}, status=409)
        await box.call(name + "MakeDir", {"path": "d/e/f g\n"}, status=400)
        await box.call(name + "Move", {"source": "d/e", "destination": "-x/y"})
        assert (await box.get("-x/y/f g\n")).content == b"12"
        await box.call(name + "Move", {"source": "gone", "destination": "z"}, status=404)
        await box.call(name + "ListDir", {"path": "-x/y/f g\n"}, status=400)
        await box.call(name + "Remove", {"path": "-x"})
        await box.call(name + "Stat", {"path": "-x"}, status=404)
        await box.call(name + "Nothing", {}, status=501)

    serve(tmp_path, body)


def test_a_watcher_tells_what_changed_since_it_was_asked(tmp_path):
    async def body(http, control):
        box = await new(http)
        name = "filesystem.Filesystem/"
        await box.put("d/old", b"1")
        who = await box.call(name + "CreateWatcher", {"path": "d", "recursive": True})
        await box.put("d/e/new", b"2")
        await box.run("echo more >> d/old; chmod 600 d/old")
        seen = (await box.call(name + "GetWatcherEvents", who))["events"]
        kinds = {(each["name"], each["type"].removeprefix("EVENT_TYPE_")) for each in seen}
        assert kinds == {
            ("e", "CREATE"),
            ("e/new", "CREATE"),
            ("e/new", "WRITE"),
            ("old", "WRITE"),
            ("old", "CHMOD"),
        }
        await box.call(name + "Remove", {"path": "d/old"})
        seen = (await box.call(name + "GetWatcherEvents", who))["events"]
        assert seen == [{"name": "old", "type": "EVENT_TYPE_REMOVE"}]
        await box.call(name + "RemoveWatcher", who)
        await box.call(name + "GetWatcherEvents", who, status=404)
        await box.call(name + "CreateWatcher", {"path": "d", "includeEntry": True}, status=501)

    serve(tmp_path, body)


def test_a_paused_sandbox_is_not_there_until_it_is_connected(tmp_path):
    async def body(http, control):
        box = await new(http)
        await box.put("kept", PNG)
        task = asyncio.create_task(box.run("sleep 60"))
        while not control.session(box.id).commands.started():
            await asyncio.sleep(0.01)
        assert (await http.post(f"/sandboxes/{box.id}/pause")).status_code == 204
        assert (await task)[1] == 137  # this driver keeps files only
        assert (await http.post(f"/sandboxes/{box.id}/pause")).status_code == 409
        assert (await http.get("/health", headers=box.headers)).status_code == 502
        assert "was not found" in (await box.get("kept")).json()["message"]
        assert (
            "was not found" in (await box.call("process.Process/List", {}, status=502))["message"]
        )
        assert list(control.keeper.driver.root.iterdir()) == []
        assert (await http.get(f"/sandboxes/{box.id}")).json()["state"] == "paused"
        for status in (201, 200):
            reply = await http.post(f"/v2/sandboxes/{box.id}/connect", json={"timeout": 100})
            assert reply.status_code == status
        assert (await box.get("kept")).content == PNG

    serve(tmp_path, body)


def test_a_sandbox_that_may_wakes_on_a_call(tmp_path):
    async def body(http, control):
        box = await new(http, autoPause=True, autoResume={"enabled": True})
        await box.put("kept", b"1")
        await http.post(f"/sandboxes/{box.id}/pause")
        assert (await box.get("kept")).content == b"1"
        assert (await http.get(f"/sandboxes/{box.id}")).json()["state"] == "running"

    serve(tmp_path, body)


def test_time_runs_out_as_the_client_chose(tmp_path):
    async def body(http, control):
        killed, paused = await new(http), await new(http, autoPause=True)
        for box in (killed, paused):
            reply = await http.post(f"/sandboxes/{box.id}/timeout", json={"timeout": 0})
            assert reply.status_code == 204
            assert (await http.get("/health", headers=box.headers)).status_code == 502
        await control.reap()
        assert (await http.get(f"/sandboxes/{killed.id}")).status_code == 404
        assert (await http.get(f"/sandboxes/{paused.id}")).json()["state"] == "paused"
        await http.post(f"/sandboxes/{paused.id}/connect", json={"timeout": 50})
        before = (await http.get(f"/sandboxes/{paused.id}")).json()["endAt"]
        await http.post(f"/sandboxes/{paused.id}/refreshes", json={"duration": 5})
        assert (await http.get(f"/sandboxes/{paused.id}")).json()["endAt"] == before

    serve(tmp_path, body)


def test_branches_and_snapshots_go_their_own_ways(tmp_path):
    async def body(http, control):
        box = await new(http, metadata={"a": "b"})
        await box.put("x", b"origin")
        reply = await http.post(f"/sandboxes/{box.id}/fork", json={"count": 2})
        left, right = (Box(http, each["sandbox"]) for each in reply.json())
        await left.put("x", b"left")
        await right.put("x", b"right")
        contents = [(await each.get("x")).content for each in (box, left, right)]
        assert contents == [b"origin", b"left", b"right"]
        assert (await http.get(f"/sandboxes/{left.id}")).json()["metadata"] == {"a": "b"}
        snapshot = (await http.post(f"/sandboxes/{left.id}/snapshots", json={})).json()
        assert (await http.get("/snapshots")).json() == [snapshot]
        await http.delete(f"/sandboxes/{left.id}")
        again = await new(http, templateID=snapshot["snapshotID"])
        network = {"network": {"allowOut": ["x.org"]}, "templateID": snapshot["snapshotID"]}
        assert "keeps the hosts" in await new(http, status=400, **network)
        assert (await again.get("x")).content == b"left"
        for status in (204, 404):
            reply = await http.delete(f"/templates/{snapshot['snapshotID']}")
            assert reply.status_code == status
        assert (await http.post(f"/sandboxes/{box.id}/fork", json={"count": 21})).status_code == 400

    serve(tmp_path, body)


def test_the_same_key_makes_one_sandbox_also_after_a_restart(tmp_path):
    made = []

    async def body(http, control):
        boxes = await asyncio.gather(
            *(new(http, headers={"Idempotency-Key": "k"}) for _ in range(3))
        )
        made.extend(box.id for box in boxes)

    serve(tmp_path, body)
    serve(tmp_path, body)
    assert len(set(made)) == 1


def test_a_new_server_goes_on_with_files_metadata_and_tokens(tmp_path):
    kept = {}

    async def first(http, control):
        box = await new(http, metadata={"a": "b"}, timeout=1000)
        await box.put("x", PNG)
        snapshot = await http.post(f"/sandboxes/{box.id}/snapshots", json={})
        kept.update(box=box, snapshot=snapshot.json())

    async def second(http, control):
        box = kept["box"]
        box.http = http
        (listed,) = (await http.get("/v2/sandboxes")).json()
        assert (listed["state"], listed["metadata"]) == ("running", {"a": "b"})
        assert (await box.get("x")).content == PNG
        assert (await http.get("/snapshots")).json() == [kept["snapshot"]]

    serve(tmp_path, first)
    serve(tmp_path, second)


def test_after_a_server_that_died_what_was_committed_is_there_and_the_rest_is_gone(tmp_path):
    kept = {}

    async def first(http, control):
        kept["lost"], kept["kept"] = await new(http), await new(http)
        await kept["kept"].put("x", b"committed")
        await http.post(f"/sandboxes/{kept['kept'].id}/snapshots", json={})
        await kept["kept"].put("x", b"later")
        image = Image(root=tmp_path / "image")
        kept["name"] = await control.keeper.create(image, Limits(), Net())
        await control.keeper.checkpoint(kept["name"])  # its create was never answered
        copy = tmp_path / "copy"
        subprocess.run(["cp", "-a", tmp_path / "served", copy], check=True)  # as the death left it

    async def second(http, control):
        with pytest.raises(SandboxError, match="never made"):
            control.keeper.place(kept["name"])
        for box in (kept["lost"], kept["kept"]):
            box.http = http
        assert (await http.get(f"/sandboxes/{kept['lost'].id}")).status_code == 404
        assert (await kept["lost"].get("x")).status_code == 502
        assert (await kept["kept"].get("x")).content == b"committed"
        assert len((await http.get("/v2/sandboxes")).json()) == 1

    serve(tmp_path, first)
    (tmp_path / "served").rename(tmp_path / "old")
    (tmp_path / "copy").rename(tmp_path / "served")
    serve(tmp_path, second)


def test_lists_are_filtered_and_come_in_pages(tmp_path):
    async def body(http, control):
        boxes = [await new(http, metadata={"n": f"{i} %"}) for i in range(3)]
        await http.post(f"/sandboxes/{boxes[0].id}/pause")

        async def ids(**query):
            reply = await http.get("/v2/sandboxes", params=query)
            return [boxes_ids.index(each["sandboxID"]) for each in reply.json()], reply.headers

        boxes_ids = [box.id for box in boxes]
        page, headers = await ids(limit=2)
        assert page == [2, 1]
        assert (await ids(limit=2, nextToken=headers["x-next-token"]))[0] == [0]
        assert (await ids(order="asc"))[0] == [0, 1, 2]
        assert (await ids(state="paused"))[0] == [0]
        assert (await ids(metadata="n=1%2520%2525"))[0] == [1]
        assert (await ids(template="other"))[0] == []
        assert (await http.get("/v2/sandboxes?order=up")).status_code == 400

    serve(tmp_path, body)


def test_metrics_tell_what_a_sandbox_uses(tmp_path):
    async def body(http, control):
        box = await new(http)
        await box.put("x", b"1" * 100_000)
        task = asyncio.create_task(box.run("x=$(head -c 3000000 /dev/zero | tr '\\0' x); sleep 60"))
        for _ in range(200):
            (sample,) = (await http.get(f"/sandboxes/{box.id}/metrics")).json()
            if sample["memUsed"] > 3_000_000:
                break
            await asyncio.sleep(0.02)
        assert sample["memUsed"] > 3_000_000
        assert sample["diskUsed"] >= 100_000
        assert sample["memTotal"] == Limits().memory_bytes
        await http.delete(f"/sandboxes/{box.id}")
        await task
        assert 'baltoro_sandboxes{place="running"} 0' in (await http.get("/metrics")).text

    serve(tmp_path, body)


def test_keys_and_tokens_are_checked(tmp_path):
    async def body(http, control):
        for headers in ({}, {"X-API-KEY": "no"}, {"X-API-KEY": "schlüssel".encode()}):
            await new(http, status=401, headers=headers)
            assert (await http.get("/v2/sandboxes", headers=headers)).status_code == 401
        box = await new(http, headers={"X-API-KEY": "two"})
        await box.put("x", b"1")
        token = box.headers.pop("X-Access-Token")
        assert (await box.get("x")).status_code == 401
        await box.call("process.Process/List", {}, status=401)
        signed = hashlib.sha256(f"x:read::{token}".encode()).digest()
        query = {"path": "x", "signature": "v1_" + base64.b64encode(signed).decode().rstrip("=")}
        host = {"host": f"49983-{box.id}.example"}
        assert (await http.get("/files", params=query, headers=host)).content == b"1"
        assert (await http.post("/files", params=query, headers=host)).status_code == 401
        late = query | {"signature_expiration": str(int(time.time()) - 1)}
        assert (await http.get("/files", params=late, headers=host)).status_code == 401
        assert (
            await http.get("/files", params=query, headers={"host": f"80-{box.id}.x"})
        ).status_code == 502

    serve(tmp_path, body, ServerConfig(api_keys=("one", "two")))


def test_what_a_sandbox_cannot_have_is_refused_by_name(tmp_path):
    async def body(http, control):
        assert "templateID='no'" in await new(http, status=404, templateID="no")
        for field, value in {
            "mcp": {"x": {}},
            "volumeMounts": [{"name": "v", "path": "/v"}],
            "iam": {"tokens": {"x": {}}},
            "allow_internet_access": True,
            "network": {"allowOut": ["example.org"]},  # this driver cannot hold it
            "timeout": -1,
            "metadata": {"a": 1},
        }.items():
            message = await new(http, status=400, **{field: value})
            assert field in message or "allowed_hosts" in message
        assert list(control.keeper.driver.root.iterdir()) == []
        box = await new(http)
        user = {"authorization": "Basic " + base64.b64encode(b"postgres:").decode()}
        message = await box.call("process.Process/List", {}, status=401, **user)
        assert "user='postgres'" in message["message"]
        reply = await http.post("/process.Process/List", content=b"", headers=box.headers)
        assert reply.status_code == 415
        reply = await http.post("/sandboxes", content=b"[]")
        assert reply.status_code == 400
        meta = box.headers | {"x-metadata-a": "b"}
        reply = await http.post("/files?path=x", content=b"1", headers=meta)
        assert "metadata" in reply.json()["message"]

    serve(tmp_path, body)


def test_a_client_that_leaves_does_not_end_its_command(tmp_path):
    async def body(http, control):
        box = await new(http)
        start = {"process": {"cmd": "sh", "args": ["-c", "sleep 0.4; echo late > out"]}}
        task = asyncio.create_task(box.stream("process.Process/Start", start))
        while not control.session(box.id).commands.started():
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        while control.session(box.id).commands.started():
            await asyncio.sleep(0.05)
        assert (await box.get("out")).content == b"late\n"

    serve(tmp_path, body)


def test_the_verb_names_what_is_wrong_with_its_options(tmp_path, capsys):
    folder = ["--folder", str(tmp_path / "f")]
    (tmp_path / "keys").write_text("\n")
    for options, words in {
        ("--driver", "docker"): "driver='docker'",
        ("--template", "x"): "template='x'",
        ("--api-key-file", str(tmp_path / "keys")): "holds no key",
    }.items():
        assert main(["--prefix", str(tmp_path), "serve", *options, *folder])
        assert words in capsys.readouterr().err
