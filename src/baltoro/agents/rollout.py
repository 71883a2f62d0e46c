"""Running episodes: one task, one harness, one policy, one sandbox, one record.

    create the sandbox, lay the task's files, commit
    repeat:  ask the policy -> run its calls -> record -> shorten the context if need be -> commit
    judge the final state on a copy, record the end, destroy the sandbox

Between turns nothing holds the sandbox: while the policy thinks, the keeper may freeze or store it.
A commit binds a snapshot to its place in the conversation. An episode that was paused, crashed or
failed through the machine's fault goes on from its last commit, under any keeper whose store has
the snapshot, and a world that belongs to another place is refused.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baltoro.agents.episode import Agent, Episode
from baltoro.agents.failure import MACHINE_ERRORS, TaskError, failure_of
from baltoro.agents.harness import Harness
from baltoro.agents.policy import Policy
from baltoro.agents.task import Task, task_digest
from baltoro.agents.trace import (
    CheckResult,
    CommitRecord,
    EndRecord,
    How,
    ObservationRecord,
    Start,
    Trace,
    TraceWriter,
    TurnRecord,
    read_trace,
)
from baltoro.agents.verify import check_driver, judge, reward_of
from baltoro.agents.workspace import Workspace, lay_files, make_folder
from baltoro.config import to_dict
from baltoro.sandbox.keeper import Keeper
from baltoro.sandbox.protocol import Image, LimitError, SandboxError


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """Where episodes run and are recorded."""

    keeper: Keeper
    images: Mapping[str, Image]  # by the name that tasks use
    folder: Path  # of records, one file per episode
    commit_every: int = 10  # turns of the main agent
    pause: asyncio.Event = field(default_factory=asyncio.Event)  # set: stop after this turn

    def __post_init__(self) -> None:
        if self.commit_every < 1:
            raise ValueError(f"runner.commit_every={self.commit_every!r}: must be at least 1")

    async def run(
        self, task: Task, harness: Harness, policy: Policy, *, episode: str, group: str, seed: int
    ) -> Trace:
        """Run an episode to its end, or until `pause`; go on with it if its record is there.

        episode: a name that no other episode of this keeper has.
        group: of the rollouts that will be compared.
        seed: of the policy's samples.

        Returns the record; one that is over is returned as it is. A machine failure is in the
        record and not raised. `ValueError` if the record is of another task, harness or seed.
        """
        start = Start(
            episode=episode,
            group=group,
            task=task.id,
            task_digest=task_digest(task),
            harness=to_dict(harness.config),
            policy=policy.name,
            driver=self.keeper.driver.name,
            seed=seed,
            created_ns=time.time_ns(),
        )
        path = self.folder / f"{episode}.jsonl"
        trace = _begun(path, start)
        if trace.is_over:
            return trace
        run = _Run(self, task, harness, policy, TraceWriter(path, trace.records))
        try:
            await run.go()
        except MACHINE_ERRORS as error:
            run.fail(error)
        finally:
            await run.let_go()
        return run.writer.trace()

    async def run_group(
        self,
        task: Task,
        harness: Harness,
        policy: Policy,
        *,
        group: str,
        num_rollouts: int,
        seed: int,
        max_running: int = 8,
    ) -> list[Trace]:
        """Rollouts of one task under one harness; a failed one does not disturb the others."""
        running = asyncio.Semaphore(max_running)

        async def one(index: int) -> Trace:
            episode = f"{group}.{index}"
            async with running:
                return await self.run(
                    task, harness, policy, episode=episode, group=group, seed=seed + index
                )

        return list(await asyncio.gather(*(one(index) for index in range(num_rollouts))))


class _Run:
    """One call of `Runner.run`: the sandbox and its commits."""

    def __init__(
        self, runner: Runner, task: Task, harness: Harness, policy: Policy, writer: TraceWriter
    ):
        self.runner = runner
        self.keeper = runner.keeper
        self.task = task
        self.harness = harness
        self.policy = policy
        self.writer = writer
        self.started = time.monotonic() - elapsed_s(writer.trace())
        self.name: str | None = None  # the keeper's, of the sandbox we hold
        self.pinned: str | None = None  # the last committed snapshot

    async def go(self) -> None:
        """Run to the end or to a pause."""
        check_driver(self.task, self.keeper)
        image = self._image()
        commits = self.writer.trace().of(CommitRecord)
        workspace = await (self._restore(commits[-1]) if commits else self._create(image))
        episode = Episode(
            task=self.task,
            image=image,
            harness=self.harness,
            policy=self.policy,
            workspace=workspace,
            writer=self.writer,
            seed=self.writer.trace().start.seed,
            started=self.started,
        )
        main = await episode.main_agent()
        try:
            if not commits:
                await self._commit(main, workspace)
            while (how := await episode.turn(main)) is None:
                if self.runner.pause.is_set():
                    await self._pause(main, workspace)
                    return
                if main.talk.turn % self.runner.commit_every == 0:
                    await self._commit(main, workspace)
            snapshot = await self._commit(main, workspace)
        except LimitError:  # its files or its memory are too much: no snapshot, nothing to judge
            self._end("sandbox_limit", episode.num_submissions, (), 0.0, None)
            return
        await self._destroy()
        results = await judge(self.task, self.task.checks, self.keeper, image, snapshot)
        reward = reward_of(self.task, results, episode.num_submissions)
        self._end(how, episode.num_submissions, results, reward, snapshot)

    def _end(
        self,
        how: How,
        num_submissions: int,
        results: tuple[CheckResult, ...],
        reward: float,
        snapshot: str | None,
    ) -> None:
        self.writer.add(
            EndRecord(
                how=how,
                results=results,
                num_submissions=num_submissions,
                reward=reward,
                snapshot=snapshot,
                wall_s=time.monotonic() - self.started,
            )
        )

    def fail(self, error: Exception) -> None:
        """Record a machine failure."""
        wall_s = time.monotonic() - self.started
        self.writer.add(EndRecord(how="failed", failure=failure_of(error), wall_s=wall_s))

    async def let_go(self) -> None:
        """Free the sandbox, the pin and the file."""
        self._pin(None)
        self.writer.close()
        with contextlib.suppress(SandboxError):  # what failed may be this very sandbox
            await self._destroy()

    async def _create(self, image: Image) -> Workspace:
        episode = self.writer.trace().start.episode
        self.name = await self.keeper.create(image, self.task.limits, self.task.net, episode)
        workspace = Workspace(self.keeper, self.name, self.task.workdir)
        async with workspace.open() as sandbox:
            await make_folder(sandbox, self.task.workdir)
            await lay_files(sandbox, self.task, self.task.files)
        return workspace

    async def _restore(self, commit: CommitRecord) -> Workspace:
        self.name = self.keeper.take(commit.snapshot)
        self._pin(commit.snapshot)
        with contextlib.suppress(SandboxError):  # gone already, or of another keeper
            await self.keeper.destroy(commit.sandbox)
        return Workspace(self.keeper, self.name, self.task.workdir, commit.binding)

    async def _commit(self, main: Agent, workspace: Workspace) -> str:
        """Snapshot the world at this place of the conversation."""
        binding = main.talk.binding()
        async with workspace.open():  # awake and in use, so that the keeper does not store it now
            snapshot = await self.keeper.checkpoint(workspace.name, binding)
        self._record_commit(main, snapshot, workspace.name, is_pause=False)
        return snapshot

    async def _pause(self, main: Agent, workspace: Workspace) -> None:
        """Commit and leave the sandbox stored with the keeper, until the episode goes on."""
        binding = main.talk.binding()
        snapshot = None
        while snapshot is None or self.keeper.store.get(snapshot).binding != binding:
            async with workspace.open():  # if the keeper stored it, it did so without the place
                pass
            snapshot = await self.keeper.store_away(workspace.name, binding)
        self._record_commit(main, snapshot, workspace.name, is_pause=True)
        self.name = None

    def _record_commit(self, main: Agent, snapshot: str, name: str, *, is_pause: bool) -> None:
        self._pin(snapshot)
        self.writer.add(
            CommitRecord(
                turn=main.talk.turn,
                snapshot=snapshot,
                binding=main.talk.binding(),
                sandbox=name,
                is_pause=is_pause,
            )
        )

    async def _destroy(self) -> None:
        if self.name is not None:
            name, self.name = self.name, None
            await self.keeper.destroy(name)

    def _pin(self, snapshot: str | None) -> None:
        """Hold the last commit, whatever the store's quota says, and let the one before go."""
        if snapshot is not None:
            self.keeper.store.pin(snapshot)
        if self.pinned is not None:
            self.keeper.store.unpin(self.pinned)
        self.pinned = snapshot

    def _image(self) -> Image:
        if self.task.image not in self.runner.images:
            raise TaskError(
                f"task {self.task.id!r}: image={self.task.image!r} is not among"
                f" {sorted(self.runner.images)}"
            )
        return self.runner.images[self.task.image]


def elapsed_s(trace: Trace) -> float:
    """Seconds that the recorded part of an episode took."""
    ends = [record.started_s + record.wall_s for record in trace.of(TurnRecord)]
    ends += [record.started_s + record.wall_s for record in trace.of(ObservationRecord)]
    return max(ends, default=0.0)


def _begun(path: Path, start: Start) -> Trace:
    """The record as far as it can be gone on with; a new one if there is none."""
    if not path.exists():
        return Trace(records=(start,))
    trace = read_trace(path)
    for name in ("task_digest", "harness", "seed", "group"):
        then, now = getattr(trace.start, name), getattr(start, name)
        if then != now:
            raise ValueError(
                f"{path}: was begun with {name}={then!r}, not {now!r}; use another episode name"
            )
    if trace.is_over:
        return trace
    return Trace(records=trace.resumable() or (start,))
