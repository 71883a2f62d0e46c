"""Processes that talk to one another through gloo, and what each of them found."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 60  # of one rank's wait for another
START_S = 120  # to import torch in every process on a busy machine


def run_ranks(work: Callable[..., Any], folder: Path, num_ranks: int, *args: Any) -> list[Any]:
    """`work(rank, *args)` in `num_ranks` processes; what each returned, tensors and containers.

    `work` must be importable by name. Raises what a rank raised; a rank that waits too long for
    another raises as well.
    """
    deadline = time.monotonic() + START_S + TIMEOUT_S
    context = mp.spawn(_start, (work, folder, num_ranks, args), nprocs=num_ranks, join=False)
    try:
        while not context.join(timeout=max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{num_ranks} ranks did not end")
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(num_ranks)]


def _start(
    rank: int, work: Callable[..., Any], folder: Path, num_ranks: int, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    torch.save(work(rank, *args), folder / f"{rank}.pt")
    dist.destroy_process_group()
