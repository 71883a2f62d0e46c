"""`baltoro sandbox`: install the tools, test what works here, run one command in a sandbox."""

import argparse
import asyncio
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from baltoro.sandbox.images import build_image
from baltoro.sandbox.install import default_prefix, install
from baltoro.sandbox.keeper import KeeperPolicy
from baltoro.sandbox.kvm import probe_kvm
from baltoro.sandbox.machine import MachineDriver
from baltoro.sandbox.protocol import MIB, Capabilities, Command, Image, Limits, Net, SandboxError
from baltoro.sandbox.selftest import STORE_BYTES, machine_drivers, selftest
from baltoro.sandbox.store import Store


def run_install(prefix: Path, tools: Sequence[str] | None = None) -> int:
    """Unpack what is missing and print a line per tool; 3 if this machine refuses one of them."""
    outcomes = install(prefix, tools)
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome.text}")
    return 0 if all(outcome.is_there for outcome in outcomes.values()) else 3


def run_selftest(
    prefix: Path, drivers: Sequence[str] | None = None, json_path: Path | None = None
) -> int:
    """Test drivers and print what each can do; 1 if none keeps memory through snapshot and fork."""
    results = asyncio.run(selftest(prefix, drivers))
    for result in results:
        print(describe(result))
    print(probe_kvm()[1])
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(result) for result in results], indent=2))
    if any(result.has_memory_snapshot and result.has_fork for result in results):
        return 0
    print("no driver keeps memory through a snapshot and a fork here", file=sys.stderr)
    return 1


def describe(result: Capabilities) -> str:
    """A driver's capabilities as lines to read."""
    if not result.is_available:
        return f"{result.driver}: cannot run here: {result.reason}"
    flags = {
        "memory snapshot": result.has_memory_snapshot,
        "fork": result.has_fork,
        "live snapshot": result.has_live_snapshot,
        "process trees": result.has_many_processes,
    }
    can = ", ".join(name for name, is_true in flags.items() if is_true) or "files only"
    times = ", ".join(f"{name} {value:g}" for name, value in result.latency_ms.items())
    return f"{result.driver} (isolation: {result.isolation}): {can}\n    ms: {times}"


def run_command(
    prefix: Path,
    driver: str,
    image: Path | None,
    argv: Sequence[str],
    allowed_hosts: Sequence[str] = (),
) -> int:
    """Run one command in a fresh sandbox; its output is ours, its exit code is returned."""

    async def run() -> int:
        with tempfile.TemporaryDirectory(prefix="baltoro-run-") as folder:
            Path(folder).chmod(0o755)
            makers = machine_drivers(prefix, Path(folder))
            if driver not in makers:
                raise ValueError(f"driver={driver!r}: choose from {', '.join(makers)}")
            mechanism = makers[driver]()
            store = Store(Path(folder, "store"), STORE_BYTES, is_durable=False)
            machines = MachineDriver(mechanism, Path(folder, "boxes"), store)
            try:
                root = Image(root=image or prefix / "image/root")
                net = Net(allowed_hosts=tuple(allowed_hosts))
                sandbox = await machines.create(root, Limits(), net)
                process = await sandbox.start(Command(argv=tuple(argv), timeout_s=None))
                async for piece in process.output():
                    stream = sys.stdout if piece.stream == "stdout" else sys.stderr
                    stream.buffer.write(piece.data)
                    stream.flush()
                return process.exit_code if process.exit_code is not None else 255
            finally:
                await machines.close()
                store.close()

    return asyncio.run(run())


def run_server(options: argparse.Namespace) -> int:
    """Serve sandboxes over HTTP until interrupted."""
    try:
        server = importlib.import_module("baltoro.sandbox.e2b.server")  # FastAPI is an extra
    except ImportError as error:
        raise ValueError(
            f"serve: needs {error.name}; pip install 'baltoro[sandbox]' brings it"
        ) from error

    keys = () if options.api_key_file is None else tuple(options.api_key_file.read_text().split())
    if options.api_key_file is not None and not keys:
        raise ValueError(f"api_key_file={str(options.api_key_file)!r}: holds no key")
    images = {"base": options.image or options.prefix / "image/root"}
    for text in options.template:
        name, equals, folder = text.partition("=")
        if not equals or not name:
            raise ValueError(f"template={text!r}: must be NAME=FOLDER")
        images[name] = Path(folder).resolve()
    policy = KeeperPolicy(
        freeze_after_s=options.freeze_after, store_after_s=options.store_after, ttl_s=None
    )
    limits = Limits(cpus=options.cpus, memory_bytes=options.memory_mb * MIB)
    quota_bytes = options.quota_gb << 30
    folder = options.folder.resolve()
    control, store = server.build(
        options.driver, folder, options.prefix, images, limits, policy, quota_bytes
    )
    print(f"sandboxes of driver {options.driver} on http://{options.host}:{options.port}")
    config = server.ServerConfig(api_keys=keys)
    server.serve(control, store, config, host=options.host, port=options.port)
    return 0


def _add_serve(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--driver", default="gvisor", help="process, gvisor, criu, qemu or firecracker"
    )
    verb.add_argument("--folder", type=Path, default=Path("sandboxes"), help="where they live")
    verb.add_argument("--host", default="127.0.0.1")
    verb.add_argument("--port", type=int, default=3000)
    verb.add_argument("--image", type=Path, help="root folder of the template named base")
    verb.add_argument("--template", action="append", default=[], metavar="NAME=FOLDER")
    verb.add_argument("--api-key-file", type=Path, help="keys, one per line; absent: no key")
    verb.add_argument("--cpus", type=float, default=1.0, help="cores of each sandbox")
    verb.add_argument("--memory-mb", type=int, default=512, help="memory of each sandbox")
    verb.add_argument("--quota-gb", type=int, default=20, help="disk for snapshots")
    verb.add_argument("--freeze-after", type=float, default=60.0, help="idle seconds")
    verb.add_argument("--store-after", type=float, default=300.0, help="idle seconds")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `baltoro sandbox`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="baltoro sandbox", description=__doc__)
    parser.add_argument("--prefix", type=Path, default=default_prefix(), help="where tools lie")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("install", help="unpack the tools into the prefix")
    verb.add_argument("tools", nargs="*")
    verb = verbs.add_parser("selftest", help="run every driver and say what it can do")
    verb.add_argument("drivers", nargs="*")
    verb.add_argument("--json", type=Path, help="write the records here")
    verb = verbs.add_parser("image", help="make a root folder for sandboxes")
    verb.add_argument("target", type=Path, help="must not be there yet")
    verb.add_argument("--base", type=Path, help="laid over this one; the prefix's own if not given")
    verb.add_argument("--package", action="append", default=[], metavar="NAME", help="of Debian")
    verb.add_argument("--layer", type=Path, action="append", default=[], metavar="FOLDER")
    verb = verbs.add_parser("run", help="run one command in a fresh sandbox")
    verb.add_argument("--driver", default="gvisor")
    verb.add_argument("--image", type=Path)
    verb.add_argument("--allow", action="append", default=[], metavar="HOST", help="reach this")
    verb.add_argument("argv", nargs="+")
    _add_serve(verbs.add_parser("serve", help="serve sandboxes to E2B's clients"))
    options = parser.parse_args(argv)
    try:
        if options.verb == "install":
            return run_install(options.prefix, options.tools or None)
        if options.verb == "selftest":
            return run_selftest(options.prefix, options.drivers or None, options.json)
        if options.verb == "image":
            base = options.base or options.prefix / "image/root"
            print(build_image(options.target, base, options.package, options.layer).root)
            return 0
        if options.verb == "serve":
            return run_server(options)
        words = (options.prefix, options.driver, options.image, options.argv, options.allow)
        return run_command(*words)
    except (SandboxError, ValueError) as error:
        print(f"baltoro sandbox: {error}", file=sys.stderr)
        return 1
