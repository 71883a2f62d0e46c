"""Launch shapes for fla's kernels: those that won before, else a search compiled side by side.

fla tries some 270 shapes for every number of heads at the first call, a second or more of one core
each. Here processes compile them at once (`Tuning.compile_ahead`, or as a kernel is first called),
shapes that ask for more shared memory than there is are left out, and each is timed for a few
milliseconds. Winners are kept in a file with the versions and the device they hold for. With it a
kernel runs as it won; for other heads and lengths it is tried in the shapes that won at some.
"""

import json
import math
import multiprocessing
import os
from ast import literal_eval
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch
import triton
from triton import knobs
from triton.errors import TritonError
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
from triton.testing import do_bench

TABLE = Path(__file__).parent / "fla_launches.json"
QUICK_BENCH = partial(do_bench, warmup=2, rep=12)  # milliseconds

Record = dict[str, object]
_prune = Autotuner.prune_configs


@dataclass(frozen=True, kw_only=True)
class Job:
    """One kernel in one shape, as another process can compile it."""

    module: str
    name: str
    data: str  # of `JITFunction.preload`


@dataclass(frozen=True, kw_only=True)
class Built:
    """What came of a job."""

    shared_bytes: int = 0
    error: str | None = None


def build(job: Job) -> Built:
    """Compile a job into Triton's cache."""
    kernel = getattr(import_module(job.module), job.name)
    while not isinstance(kernel, JITFunction):
        kernel = kernel.fn
    try:
        return Built(shared_bytes=kernel.preload(job.data).metadata.shared)
    except (TritonError, RuntimeError) as error:
        return Built(error=f"{type(error).__name__}: {str(error)[:200]}")


def job_of(tuner: Autotuner, kwargs: dict[str, object], config: triton.Config) -> Job | None:
    """The job of a call of `tuner`, which holds its positional arguments; None where it is done."""
    found: list[Job] = []

    def collect(*, fn: object, compile: dict[str, str], **_: object) -> bool:
        found.append(Job(module=fn.module, name=fn.name, data=compile["specialization_data"]))
        return True  # which ends the call before it compiles

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, collect
    try:
        given = {**kwargs, "warmup": True, **config.all_kwargs()}
        tuner.fn.run(*tuner.nargs.values(), **given)
    finally:
        knobs.runtime.jit_cache_hook = before
    return found[0] if found else None


def record_of(config: triton.Config) -> Record:
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


def distance(kernel: str, config: triton.Config) -> float:
    """How far a shape is from the usual winner on an H200, in doublings.

    That has one warp in kernels over 16 rows; four, tiles of 64 and few stages in the others.
    """
    warps = 1 if "intra" in kernel or "inter_solve" in kernel else 4
    sizes = [value for value in config.kwargs.values() if isinstance(value, int) and value > 0]
    off = abs(math.log2(config.num_warps / warps)) + 0.1 * abs(config.num_stages - 2)
    return off + sum(abs(math.log2(value / 64)) for value in sizes)


class Tuning:
    """fla's autotuning, in the whole process, from now on.

    Winners of `table` are taken as they are if it was made with this device and these versions.
    For other kernels the `nearest` shapes that fit are tried, or all of them if it is None.
    `workers` processes compile, one a core but one if it is None; with 0 this one does, which is
    quicker where Triton's cache has everything.
    """

    def __init__(
        self, *, table: Path = TABLE, nearest: int | None = None, workers: int | None = None
    ):
        self.table, self.nearest = table, nearest
        self.winners = self._read()
        self.tried: dict[str, int] = {}
        self._tuners: set[Autotuner] = set()
        self._built: dict[Job, Future[Built]] = {}
        self._pool: ProcessPoolExecutor | None = None
        self._workers = max(1, (os.cpu_count() or 2) - 1) if workers is None else workers
        Autotuner.prune_configs = lambda tuner, kwargs: self._candidates(tuner, kwargs)
        Autotuner.do_bench = staticmethod(QUICK_BENCH)

    def what(self) -> str:
        """How shapes were found, for the record."""
        held = "all that fit" if self.nearest is None else f"the {self.nearest} nearest that fit"
        return (
            f"{len(self.winners)} shapes of {self.table.name}; {held} tried for {len(self.tried)}"
        )

    def compile_ahead(self, run: Callable[[], object], seconds: float = 600.0) -> dict[str, int]:
        """Compile what `run` would try, side by side, and launch none of fla's tuned kernels.

        Their results are left as they are, so `run` must not depend on them. Says how many shapes
        were compiled, how many failed, and how many were not begun after `seconds`: those are not
        tried either.
        """

        def submit(tuner: Autotuner, *args: object, **kwargs: object) -> None:
            tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
            for config in self._wanted(tuner, kwargs):
                self._submit(tuner, kwargs, config)

        with mock.patch.object(Autotuner, "run", submit):
            run()
        wait(self._built.values(), timeout=seconds)
        for future in self._built.values():
            future.cancel()
        built = [f.result() for f in self._built.values() if not f.cancelled()]
        return {
            "compiled": len(built),
            "failed": sum(one.error is not None for one in built),
            "not begun": len(self._built) - len(built),
        }

    def save(self, path: Path | None = None) -> None:
        """Write every winner, those that were read too."""
        for tuner in self._tuners:
            self._keep(tuner)
        head = json.dumps(self._made_with())[:-1]
        lines = (
            f"{json.dumps(name)}: {json.dumps(self.winners[name])}" for name in sorted(self.winners)
        )
        text = head + ', "winners": {\n' + ",\n".join(lines) + "}}\n"
        (path or self.table).write_text(text)

    def _keep(self, tuner: Autotuner) -> None:
        for key, config in tuner.cache.items():
            self.winners[f"{tuner.base_fn.__name__} {key}"] = record_of(config)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _made_with(self) -> dict[str, str]:
        fla = import_module("fla")
        return {
            "device": torch.cuda.get_device_name(),
            "triton": triton.__version__,
            "fla": fla.__version__,
        }

    def _read(self) -> dict[str, Record]:
        if not self.table.exists():
            return {}
        held = json.loads(self.table.read_text())
        for name, value in self._made_with().items():
            if held[name] != value:
                print(f"bench: {self.table.name} is of {name} {held[name]}, not {value}: unused")
                return {}
        return held["winners"]

    def _wanted(self, tuner: Autotuner, kwargs: dict[str, object]) -> list[triton.Config]:
        """What to try, the likeliest first: what won, else what won at other sizes, else all."""
        kernel = tuner.base_fn.__name__
        configs = _prune(tuner, kwargs)
        name = identity(tuner, kwargs)
        self._keep(tuner)
        records = [self.winners.get(name)]
        if records == [None]:
            width = width_of(tuner, name)
            records = [
                record
                for other, record in self.winners.items()
                if other.split()[0] == kernel and width_of(tuner, other) == width
            ]
        won = [config for config in configs if record_of(config) in records]
        return won or sorted(configs, key=lambda config: distance(kernel, config))

    def _candidates(self, tuner: Autotuner, kwargs: dict[str, object]) -> list[triton.Config]:
        """What the autotuner is to try: called where it has not yet seen the sizes of a call."""
        tuner.cache_results = False
        self._tuners.add(tuner)
        wanted = self._wanted(tuner, kwargs)
        if len(wanted) == 1:
            return wanted
        fitting: list[triton.Config] = []
        most = len(wanted) if self.nearest is None else self.nearest
        while wanted and len(fitting) < most:
            count = most - len(fitting)
            batch, wanted = wanted[:count], wanted[count:]
            futures = [self._submit(tuner, kwargs, config) for config in batch]
            fitting += [c for c, f in zip(batch, futures, strict=True) if f is None or fits(f)]
        self.tried[identity(tuner, kwargs)] = len(fitting)
        if not fitting:
            raise RuntimeError(f"no shape of fla's {tuner.base_fn.__name__} fits this GPU")
        return fitting

    def _submit(
        self, tuner: Autotuner, kwargs: dict[str, object], config: triton.Config
    ) -> Future[Built] | None:
        job = job_of(tuner, kwargs, config)
        if job is None:
            return None
        if job not in self._built:
            self._built[job] = self._start(job)
        return self._built[job]

    def _start(self, job: Job) -> Future[Built]:
        if self._workers == 0:
            future: Future[Built] = Future()
            future.set_result(build(job))
            return future
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, mp_context=context)
        return self._pool.submit(build, job)


def identity(tuner: Autotuner, kwargs: dict[str, object]) -> str:
    """A kernel and its tuning key, as Triton's autotuner forms it."""
    given = {name: x for name, x in {**tuner.nargs, **kwargs}.items() if name in tuner.arg_names}
    key = [given[name] for name in tuner.keys if name in given]
    key += [str(x.dtype) for x in given.values() if hasattr(x, "dtype")]
    return f"{tuner.base_fn.__name__} {tuple(key)}"


def width_of(tuner: Autotuner, name: str) -> object:
    """The width in an identity, None where the kernel has none: what won at another says little."""
    key = literal_eval(name.partition(" ")[2])
    return key[tuner.keys.index("D")] if "D" in tuner.keys else None


def fits(future: Future[Built]) -> bool:
    if future.cancelled():
        return False
    built = future.result()
    most = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    return built.error is None and built.shared_bytes <= most
