"""The harness: the program around a policy, composed of modules that a configuration chooses.

    system prompt    which sections, in which order and wording
    tool interface   which tools, under which names
    context policy   how long, and how it is shortened (`conversation.py`)
    skills           texts that can be looked up, listed or spelled out
    memory           a file of notes in the sandbox that every context begins with
    sub-agents       a tool that hands part of the work to a fresh context in the same sandbox

One configuration serves all rollouts of a task, drawn from a seed (`styles.py`), so that a group is
compared under one harness and the policy meets many of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from baltoro.agents.conversation import ContextPolicy
from baltoro.agents.failure import HarnessError
from baltoro.agents.task import Task
from baltoro.agents.tools import Tool, Toolbox, tool_of
from baltoro.agents.workspace import Function

Kind = Literal[
    "shell", "read", "write", "edit", "search", "skill", "remember", "delegate", "submit"
]
Section = Literal["role", "manner", "place", "skills", "memory"]
CONCURRENT = frozenset({"delegate"})

# Several wordings of each section, so that none of them becomes a password.
WORDINGS: dict[str, tuple[str, ...]] = {
    "role": (
        "You are an agent that completes tasks in a Linux sandbox by calling tools.",
        "You are a careful software engineer working alone in a terminal.",
        "Act as an autonomous assistant. You have tools; use them until the task is done.",
    ),
    "manner": (
        "Look before you change anything, make the smallest change that does the job, and check "
        "the result by running it. When everything is done, answer without calling a tool.",
        "Work step by step. Verify what you did with the tools you have. Your final message, the "
        "one without a tool call, ends the task.",
        "Nobody will answer questions: decide for yourself. Finish with a short report and no "
        "tool call.",
    ),
    "place": (
        "The working folder is {workdir}. There is no network unless the task says so.",
        "All paths are relative to {workdir} unless they are absolute.",
        "Your shell starts in {workdir}; what you leave there is what will be judged.",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFace:
    """How one of our tools looks to the model."""

    name: str
    renamed: dict[str, str] = field(default_factory=dict)  # our parameter: the model's name
    description: str | None = None  # None: our own


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptConfig:
    """The system prompt."""

    sections: tuple[Section, ...] = ("role", "manner", "place", "skills", "memory")
    wording: int = 0  # which of the wordings of each section
    in_user_message: bool = False  # before the task, instead of a system message of its own

    def __post_init__(self) -> None:
        if len(set(self.sections)) < len(self.sections):
            raise ValueError(f"prompt.sections={self.sections!r}: each at most once")
        if self.wording < 0:
            raise ValueError(f"prompt.wording={self.wording!r}: must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """Notes that outlive a context."""

    path: str = ".notes.md"  # in the working folder


@dataclass(frozen=True, kw_only=True, slots=True)
class SubagentConfig:
    """Agents that an agent may start."""

    max_agents: int = 4  # in one episode
    max_turns: int = 20  # of each

    def __post_init__(self) -> None:
        if self.max_agents < 1 or self.max_turns < 1:
            raise ValueError(
                f"subagents.max_agents={self.max_agents!r}, max_turns={self.max_turns!r}:"
                " must be at least 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessConfig:
    """A whole harness."""

    style: str  # a name for people
    interface: dict[str, ToolFace]  # by kind, in the order of declaration
    prompt: PromptConfig = field(default_factory=PromptConfig)
    context: ContextPolicy = field(default_factory=ContextPolicy)
    skills: Literal["off", "on demand", "spelled out"] = "off"
    memory: MemoryConfig | None = None
    subagents: SubagentConfig | None = None
    effort: Literal["low", "high", "max"] | None = None
    max_turns: int = 100
    max_reply_tokens: int | None = None
    max_observation_chars: int = 20000

    def __post_init__(self) -> None:
        unknown = set(self.interface) - set(get_args(Kind))
        if unknown:
            raise ValueError(
                f"harness.interface={sorted(unknown)!r}: not among {', '.join(get_args(Kind))}"
            )
        names = [face.name for face in self.interface.values()]
        if len(set(names)) < len(names):
            raise ValueError(f"harness.interface: names={names!r}: must differ")
        if self.max_turns < 1 or self.max_observation_chars < 100:
            raise ValueError(
                f"harness.max_turns={self.max_turns!r}, max_observation_chars="
                f"{self.max_observation_chars!r}: must be at least 1 and 100"
            )
        wants = {
            "skill": self.skills == "on demand",
            "remember": self.memory is not None,
            "delegate": self.subagents is not None,
        }
        for kind, is_wanted in wants.items():
            if is_wanted and kind not in self.interface:
                raise ValueError(f"harness.interface: lacks {kind!r}, which this harness uses")


@dataclass(frozen=True, kw_only=True, slots=True)
class Skill:
    """Knowledge that can be looked up."""

    name: str
    summary: str  # one line
    body: str


class Harness:
    """A configuration with what it may use: skills, and tools of other origin such as MCP."""

    def __init__(
        self, config: HarnessConfig, *, skills: Sequence[Skill] = (), tools: Iterable[Tool] = ()
    ):
        self.config = config
        self.skills = {skill.name: skill for skill in skills}
        self.tools = tuple(tools)
        if config.skills != "off" and not skills:
            raise ValueError(f"harness.skills={config.skills!r}: give skills, or say 'off'")

    def opening(self, task: Task, notes: str | None) -> list[dict[str, Any]]:
        """The messages that a context of the main agent begins with.

        notes: what the memory file holds; None if there is none.
        """
        system = self._system(task, notes)
        if self.config.prompt.in_user_message:
            return [{"role": "user", "content": f"{system}\n\n{task.prompt}"}]
        return [{"role": "system", "content": system}, {"role": "user", "content": task.prompt}]

    def sub_opening(self, task: Task, prompt: str) -> list[dict[str, Any]]:
        """The messages that a sub-agent begins with."""
        system = self._system(task, None)
        return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]

    def toolbox(self, functions: Mapping[str, Function]) -> Toolbox:
        """The tools on offer: those of `functions` that the interface names, then the others."""
        own = [
            tool_of(
                functions[kind],
                name=face.name,
                renamed=face.renamed,
                description=face.description,
                is_concurrent=kind in CONCURRENT,
            )
            for kind, face in self.config.interface.items()
            if kind in functions
        ]
        try:
            return Toolbox([*own, *self.tools])
        except ValueError as error:
            raise HarnessError(f"style {self.config.style!r}: {error}") from error

    def skill_function(self) -> Function:
        """The tool that looks up a skill."""

        async def skill(name: str) -> str:
            """Read one of the skills that the system prompt lists.

            name: the skill
            """
            if name not in self.skills:
                raise ValueError(f"no skill {name!r}; there are {', '.join(self.skills)}")
            return self.skills[name].body

        return skill

    def _system(self, task: Task, notes: str | None) -> str:
        parts = []
        for section in self.config.prompt.sections:
            if section == "skills":
                parts.append(self._skill_text())
            elif section == "memory":
                parts.append(f"Your notes from before:\n{notes}" if notes else "")
            else:
                wordings = WORDINGS[section]
                wording = wordings[self.config.prompt.wording % len(wordings)]
                parts.append(wording.format(workdir=task.workdir))
        return "\n\n".join(part for part in parts if part)

    def _skill_text(self) -> str:
        if self.config.skills == "off":
            return ""
        if self.config.skills == "spelled out":
            return "\n\n".join(f"# {skill.name}\n{skill.body}" for skill in self.skills.values())
        name = self.config.interface["skill"].name
        lines = [f"- {skill.name}: {skill.summary}" for skill in self.skills.values()]
        return "\n".join([f"Skills that the tool `{name}` reads out:", *lines])
