"""`baltoro sandbox`: install the tools, test what works here, run one command in a sandbox."""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from baltoro.sandbox.install import default_prefix, install
from baltoro.sandbox.kvm import probe_kvm
from baltoro.sandbox.machine import MachineDriver
from baltoro.sandbox.protocol import Capabilities, Command, Image, Limits, Net, SandboxError
from baltoro.sandbox.selftest import STORE_BYTES, machine_drivers, selftest
from baltoro.sandbox.store import Store


def run_install(prefix: Path, tools: Sequence[str] | None = None) -> int:
    """Unpack what is missing and print a line per tool."""
    for name, outcome in install(prefix, tools).items():
        print(f"{name}: {outcome}")
    return 0


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


def run_command(prefix: Path, driver: str, image: Path | None, argv: Sequence[str]) -> int:
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
                sandbox = await machines.create(root, Limits(), Net())
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
    verb = verbs.add_parser("run", help="run one command in a fresh sandbox")
    verb.add_argument("--driver", default="gvisor")
    verb.add_argument("--image", type=Path)
    verb.add_argument("argv", nargs="+")
    options = parser.parse_args(argv)
    try:
        if options.verb == "install":
            return run_install(options.prefix, options.tools or None)
        if options.verb == "selftest":
            return run_selftest(options.prefix, options.drivers or None, options.json)
        return run_command(options.prefix, options.driver, options.image, options.argv)
    except (SandboxError, ValueError) as error:
        print(f"baltoro sandbox: {error}", file=sys.stderr)
        return 1
