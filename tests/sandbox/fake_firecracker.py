"""A Firecracker without a machine: the documented API, strict, over a guest of a few pages.

It stands in for the release binary 1.10.1 where no KVM is: `firecracker.yaml` and
`snapshot-support.md` of that release are what it keeps. A call out of order, an unknown or missing
key, a wrong type, a path that is not there: 400 with `fault_message`, as the real one, which
denies unknown fields. Its guest is an agent on a vsock whose whole state, `COUNT` processes and
files, lies in the machine's memory, so that a snapshot which lost a page, went over the wrong base
or was shared by two branches shows.

Beside the program, `calls` gets a line per request and `behaviour` (JSON) may hold:

    refuse    {path: message}   these calls are refused
    boot      "panic" or "hang" instead of a guest that listens
    version   of the release
"""

import argparse
import asyncio
import errno
import gzip
import json
import mmap
import os
import struct
import sys
import zlib
from pathlib import Path

PAGE = 4096
HEAD = struct.Struct("<IBI")
INDEX_BYTES = 64 * PAGE  # the guest's table, at the start of memory
FIRST_REFUSED = 2  # connections before a booting guest listens
AFTER_START = "The requested operation is not supported after starting the microVM."
BEFORE_START = "The requested operation is not supported before starting the microVM."
TOO_LATE = "Loading a microVM snapshot not allowed after configuring boot-specific resources."
# Of each call: keys with their types, those that must be there.
SCHEMA = {
    ("PUT", "/machine-config"): (
        {"vcpu_count": int, "mem_size_mib": int, "track_dirty_pages": bool, "smt": bool},
        {"vcpu_count", "mem_size_mib"},
    ),
    ("PUT", "/boot-source"): (
        {"kernel_image_path": str, "initrd_path": str, "boot_args": str},
        {"kernel_image_path"},
    ),
    ("PUT", "/drives/image"): (
        {"drive_id": str, "path_on_host": str, "is_root_device": bool, "is_read_only": bool},
        {"drive_id", "path_on_host", "is_root_device"},
    ),
    ("PUT", "/vsock"): ({"guest_cid": int, "uds_path": str}, {"guest_cid", "uds_path"}),
    ("PUT", "/actions"): ({"action_type": str}, {"action_type"}),
    ("PATCH", "/vm"): ({"state": str}, {"state"}),
    ("PUT", "/snapshot/create"): (
        {"snapshot_type": str, "snapshot_path": str, "mem_file_path": str},
        {"snapshot_path", "mem_file_path"},
    ),
    ("PUT", "/snapshot/load"): (
        {
            "snapshot_path": str,
            "mem_backend": dict,
            "mem_file_path": str,
            "enable_diff_snapshots": bool,
            "resume_vm": bool,
        },
        {"snapshot_path"},
    ),
}


class Refusal(Exception):
    """A 400 with these words."""


class Guest:
    """Memory, and an agent that keeps everything in it."""

    def __init__(self, memory: mmap.mmap):
        self.memory = memory
        self.dirty: set[int] = set()
        (size,) = struct.unpack_from("<Q", memory)
        blank = {"files": {}, "counts": {}, "next": INDEX_BYTES, "quiet": False, "greeted": False}
        blank["token"] = ""
        self.table = json.loads(memory[8 : 8 + size]) if size else blank
        self.writing: dict[int, tuple[str, bytearray]] = {}

    def poke(self, offset: int, data: bytes) -> None:
        self.memory[offset : offset + len(data)] = data
        self.dirty |= set(range(offset // PAGE, (offset + len(data)) // PAGE + 1))

    def save_table(self) -> None:
        data = json.dumps(self.table).encode()
        assert len(data) < INDEX_BYTES - 8
        self.poke(0, struct.pack("<Q", len(data)) + data)

    def frame(self, kind: str, number: int, payload: bytes) -> list[tuple[str, bytes]]:
        """What the agent answers."""
        name = str(number)
        if kind == "Q":
            self.table["quiet"] = True
            answer = [("q", b"")]
        elif kind == "G":
            self.table["quiet"] = False
            answer = []
        elif kind == "S":
            answer = [("s", b"")]
        elif kind == "T":
            self.table["token"] = payload.hex()
            answer = [("t", b"")]
        elif kind == "X":
            argv = payload[1:].split(b"\0")[2:]
            if argv[0] != b"COUNT":
                return [("E", struct.pack("<I", errno.ENOENT))]
            self.table["counts"][name] = 0
            answer = []
        elif kind == "I" and name in self.table["counts"]:
            self.table["counts"][name] += int(payload or b"0")
            answer = [("O", b"%d\n" % self.table["counts"][name])] if payload else []
        elif kind == "W":
            self.writing[number] = (payload.split(b"\0")[1].decode(), bytearray())
            answer = []
        elif kind == "D":
            path, data = self.writing[number]
            data += payload
            answer = [] if payload else [("E", bytes(4))]
            if not payload:
                self.poke(self.table["next"], bytes(data))
                self.table["files"][path] = [self.table["next"], len(data)]
                self.table["next"] += -(-len(data) // PAGE) * PAGE + 64 * PAGE
        elif kind == "R":
            path, wanted = payload.decode().split("\0")
            offset, size = self.table["files"].get(path, (0, -1))
            code = errno.ENOENT if size < 0 else errno.EFBIG if size > int(wanted) else 0
            data = self.memory[offset : offset + size] if size > 0 and not code else b""
            answer = [("D", data)] if data else []
            answer.append(("E", struct.pack("<I", code)))
        else:
            answer = []
        self.save_table()
        return answer


class Fake:
    """One process of it."""

    def __init__(self, folder: Path, name: str):
        self.folder = folder
        self.name = name
        self.behaviour = json.loads((folder / "behaviour").read_text())
        self.state = "Not started"
        self.config: dict[str, dict] = {}
        self.guest: Guest | None = None
        self.is_tracking = False
        self.resumed = asyncio.Event()
        self.open: set[asyncio.StreamWriter] = set()
        self.num_refused = FIRST_REFUSED
        self.is_reset_due = False  # the guest will hear of a snapshot when it runs again
        self.num_cut = 0  # connections that come before it has heard
        self.servers: list[asyncio.Server] = []

    async def serve(self, socket: str) -> None:
        print(f"Running Firecracker v{self.behaviour['version']}", flush=True)
        self.servers.append(await asyncio.start_unix_server(self.on_request, socket))
        await asyncio.Event().wait()

    async def on_request(self, reader, writer) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, protocol = head.split("\r\n")[0].split()
        headers = dict(line.lower().split(": ") for line in head.split("\r\n")[1:-2])
        raw = await reader.readexactly(int(headers["content-length"]))
        status, reply, is_fatal = 204, b"", False
        try:
            if protocol != "HTTP/1.1" or headers["content-type"] != "application/json":
                raise Refusal("Invalid request.")
            body = self.checked(method, path, raw)
            await self.act(method, path, body)
        except (Refusal, OSError) as error:
            status, reply = 400, json.dumps({"fault_message": str(error)}).encode()
            is_fatal = path == "/snapshot/load" and str(error) != TOO_LATE
        line = {"id": self.name, "call": f"{method} {path}", "status": status}
        with (self.folder / "calls").open("a") as out:
            out.write(json.dumps({**line, "body": json.loads(raw), "open": len(self.open)}) + "\n")
        text = f"HTTP/1.1 {status} \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n"
        if reply:
            text += f"Content-Type: application/json\r\nContent-Length: {len(reply)}\r\n"
        writer.write(text.encode() + b"\r\n" + reply)
        await writer.drain()
        if is_fatal:
            os._exit(1)
        await reader.read()
        writer.close()

    def checked(self, method: str, path: str, raw: bytes) -> dict:
        if (method, path) not in SCHEMA:
            raise Refusal(f"Invalid request method and/or path: {method} {path}.")
        types, required = SCHEMA[method, path]
        body = json.loads(raw)
        for key, value in body.items():
            if key not in types:
                raise Refusal(f"unknown field `{key}`, expected one of {sorted(types)}")
            if type(value) is not types[key]:
                raise Refusal(f"invalid type of `{key}`: {value!r}")
        for key in sorted(required - set(body)):
            raise Refusal(f"missing field `{key}`")
        if path in self.behaviour.get("refuse", {}):
            raise Refusal(self.behaviour["refuse"][path])
        return body

    async def act(self, method: str, path: str, body: dict) -> None:
        is_started = self.state != "Not started"
        if path == "/vm" or path == "/snapshot/create":
            if not is_started:
                raise Refusal(BEFORE_START)
            await (self.set_state if path == "/vm" else self.create)(body)
        elif is_started:
            raise Refusal(AFTER_START)
        elif path == "/snapshot/load":
            if self.config:
                raise Refusal(TOO_LATE)
            await self.load(body)
        elif path == "/actions":
            if body["action_type"] != "InstanceStart":
                raise Refusal(f"unknown variant `{body['action_type']}`")
            await self.start()
        else:
            self.configure(path, body)

    def configure(self, path: str, body: dict) -> None:
        if path == "/machine-config" and not 1 <= body["vcpu_count"] <= 32:
            raise Refusal("The vCPU number is invalid! The vCPU number can only be 1 to 32.")
        if path == "/boot-source":
            with open(body["kernel_image_path"], "rb") as kernel:
                if kernel.read(4) != b"\x7fELF":
                    raise Refusal("Cannot load kernel: Invalid Elf magic number.")
        if path == "/drives/image":
            open(body["path_on_host"], "rb" if body["is_read_only"] else "r+b").close()
        if path == "/vsock" and body["guest_cid"] < 3:
            raise Refusal("invalid guest_cid")
        self.config[path] = body

    async def start(self) -> None:
        source = self.config.get("/boot-source")
        if source is None:
            raise Refusal("Cannot start microvm without kernel configuration.")
        words = dict(word.partition("=")[::2] for word in source["boot_args"].split())
        machine = self.config.get("/machine-config", {"mem_size_mib": 128, "vcpu_count": 1})
        self.is_tracking = machine.get("track_dirty_pages", False)
        self.state = "Running"
        self.resumed.set()
        if self.behaviour.get("boot") == "panic":
            print("Kernel panic - not syncing: no init", flush=True)
            asyncio.get_running_loop().call_later(0.02, os._exit, 0)
            return
        archive = gzip.decompress(Path(source["initrd_path"]).read_bytes())
        for name in (b"\0init\0", b"\0agent\0", b"\0modules/list\0"):
            if name[1:] not in archive:
                raise Refusal(f"the initramfs lacks {name!r}")
        for word in ("disk_bytes", "max_pids"):  # what vminit.c demands
            assert int(words[word]) > 0
        assert words["vsock_port"] == "52" and "/drives/image" in self.config
        self.guest = Guest(mmap.mmap(-1, machine["mem_size_mib"] << 20))
        print("[    0.000000] Linux version 6.1 " + "." * (1 << 20), flush=True)
        await self.listen()

    async def set_state(self, body: dict) -> None:
        if body["state"] not in ("Paused", "Resumed"):
            raise Refusal(f"unknown variant `{body['state']}`, expected `Paused` or `Resumed`")
        self.state = "Running" if body["state"] == "Resumed" else "Paused"
        if self.state == "Paused":
            self.resumed.clear()
        else:
            if self.is_reset_due:
                self.is_reset_due = False
                self.num_cut = 1
                for writer in self.open:
                    writer.close()
            self.resumed.set()

    async def create(self, body: dict) -> None:
        assert self.guest is not None
        if self.state != "Paused":
            raise Refusal("Cannot save the microVM state: save/restore unavailable while running")
        kind = body.get("snapshot_type", "Full")
        if kind == "Diff" and not self.is_tracking:
            raise Refusal("Diff snapshots are not allowed with dirty page tracking disabled.")
        memory = self.guest.memory
        pages = range(len(memory) // PAGE) if kind == "Full" else sorted(self.guest.dirty)
        with open(body["mem_file_path"], "wb") as out:
            out.truncate(len(memory))
            for page in pages:
                data = memory[page * PAGE : (page + 1) * PAGE]
                if kind == "Diff" or any(data):
                    out.seek(page * PAGE)
                    out.write(data)
        self.guest.dirty.clear()
        device = json.dumps(
            {
                "version": self.behaviour["version"],
                "size": len(memory),
                "disk": self.config["/drives/image"]["path_on_host"],
                "uds_path": self.config["/vsock"]["uds_path"],
            }
        ).encode()
        Path(body["snapshot_path"]).write_bytes(struct.pack("<I", zlib.crc32(device)) + device)
        self.is_reset_due = True

    async def load(self, body: dict) -> None:
        if ("mem_backend" in body) == ("mem_file_path" in body):
            raise Refusal("either `mem_backend` or `mem_file_path` must be given")
        backend = body["mem_backend"]
        if set(backend) != {"backend_type", "backend_path"} or backend["backend_type"] != "File":
            raise Refusal(f"unknown memory backend {backend}")
        raw = Path(body["snapshot_path"]).read_bytes()
        if zlib.crc32(raw[4:]) != struct.unpack_from("<I", raw)[0]:
            raise Refusal("Failed to restore from snapshot: CRC64 validation failed")
        device = json.loads(raw[4:])
        if device["version"] != self.behaviour["version"]:
            raise Refusal(f"Invalid snapshot version {device['version']}")
        fd = os.open(backend["backend_path"], os.O_RDONLY)
        if os.fstat(fd).st_size != device["size"]:
            raise Refusal("The memory file has another size than the machine")
        memory = mmap.mmap(fd, device["size"], access=mmap.ACCESS_COPY)
        os.close(fd)
        open(device["disk"], "rb").close()
        self.config["/drives/image"] = {"path_on_host": device["disk"]}
        self.config["/vsock"] = {"uds_path": device["uds_path"]}
        self.guest = Guest(memory)
        self.is_tracking = body.get("enable_diff_snapshots", False)
        self.state = "Paused"
        self.is_reset_due = True
        self.num_refused = 0
        await self.listen()
        if body.get("resume_vm", False):
            await self.set_state({"state": "Resumed"})

    async def listen(self) -> None:
        path = self.config["/vsock"]["uds_path"]
        if os.path.exists(path):
            raise Refusal("Cannot create backend for vsock device: Address in use")
        self.servers.append(await asyncio.start_unix_server(self.on_guest, path))

    async def on_guest(self, reader, writer) -> None:
        line = await reader.readline()
        await self.resumed.wait()
        if line != b"CONNECT 52\n" or self.num_refused > 0 or self.behaviour.get("boot") == "hang":
            self.num_refused -= 1
            writer.close()
            return
        writer.write(b"OK 1073741824\n")
        if self.num_cut > 0:  # it came before the guest had handled the reset
            self.num_cut -= 1
            writer.close()
            return
        assert self.guest is not None
        self.open.add(writer)
        if not self.guest.table["greeted"]:
            self.guest.table["greeted"] = True
            writer.write(HEAD.pack(0, ord("h"), 0))
        try:
            while True:
                size, kind, number = HEAD.unpack(await reader.readexactly(HEAD.size))
                payload = await reader.readexactly(size)
                await self.resumed.wait()
                for answer, data in self.guest.frame(chr(kind), number, payload):
                    token = b"" if kind == ord("T") else bytes.fromhex(self.guest.table["token"])
                    writer.write(HEAD.pack(len(data), ord(answer), number) + token + data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.open.discard(writer)
            writer.close()


def main() -> None:
    """As the release is started."""
    folder = Path(sys.argv[0]).parent
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--id")
    parser.add_argument("--api-sock")
    options = parser.parse_args()
    if options.version:
        version = json.loads((folder / "behaviour").read_text())["version"]
        print(f"Firecracker v{version}\n\nSupported snapshot data format versions: 4.0.0")
        return
    asyncio.run(Fake(folder, options.id).serve(options.api_sock))


if __name__ == "__main__":
    main()
