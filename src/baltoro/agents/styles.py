"""Harness configurations in the style of known harnesses, and drawing one per task group.

What is imitated is what a model sees: names of tools and parameters (as each project's public
documentation has them in 2026), prompt placement, context and delegation habits. What is not: their
texts, and tools of theirs that ours do not have, such as a browser or a patch format. Units stay
ours: a time limit is in seconds under every name.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from baltoro.agents.conversation import ContextPolicy
from baltoro.agents.harness import (
    WORDINGS,
    HarnessConfig,
    MemoryConfig,
    PromptConfig,
    Section,
    SubagentConfig,
    ToolFace,
)
from baltoro.config import nearest

_EDIT_STRINGS = {"path": "file_path", "old": "old_string", "new": "new_string"}

STYLES: dict[str, HarnessConfig] = {
    "plain": HarnessConfig(
        style="plain",
        interface={
            kind: ToolFace(name=kind)
            for kind in ("shell", "read", "write", "edit", "search", "submit")
        },
    ),
    "kimi-code": HarnessConfig(
        style="kimi-code",
        interface={
            "delegate": ToolFace(name="Task"),
            "shell": ToolFace(name="Shell", renamed={"timeout_s": "timeout"}),
            "read": ToolFace(
                name="ReadFile", renamed={"first_line": "line_offset", "num_lines": "n_lines"}
            ),
            "search": ToolFace(name="Grep"),
            "write": ToolFace(name="WriteFile"),
            "edit": ToolFace(name="StrReplaceFile"),
            "submit": ToolFace(name="Submit"),
        },
        subagents=SubagentConfig(),
    ),
    "claude-code": HarnessConfig(
        style="claude-code",
        interface={
            "delegate": ToolFace(name="Agent"),
            "shell": ToolFace(name="Bash", renamed={"timeout_s": "timeout"}),
            "read": ToolFace(
                name="Read",
                renamed={"path": "file_path", "first_line": "offset", "num_lines": "limit"},
            ),
            "write": ToolFace(name="Write", renamed={"path": "file_path"}),
            "edit": ToolFace(name="Edit", renamed=_EDIT_STRINGS),
            "search": ToolFace(name="Grep"),
            "skill": ToolFace(name="Skill"),
            "submit": ToolFace(name="Submit"),
        },
        context=ContextPolicy(compact_at_tokens=98304, method="summary", keep_turns=0),
        subagents=SubagentConfig(max_agents=8),
    ),
    "codex": HarnessConfig(  # the shell alone
        style="codex",
        interface={
            "shell": ToolFace(name="exec_command", renamed={"command": "cmd"}),
            "submit": ToolFace(name="submit"),
        },
        context=ContextPolicy(compact_at_tokens=114688, method="summary", keep_turns=2),
    ),
    "openclaw": HarnessConfig(
        style="openclaw",
        interface={
            "read": ToolFace(name="read"),
            "write": ToolFace(name="write"),
            "edit": ToolFace(name="edit"),
            "shell": ToolFace(name="exec"),
            "delegate": ToolFace(name="sessions_spawn", renamed={"prompt": "task"}),
            "remember": ToolFace(name="memory_write"),
            "submit": ToolFace(name="submit"),
        },
        prompt=PromptConfig(sections=("role", "skills", "memory", "place", "manner")),
        memory=MemoryConfig(path="MEMORY.md"),
        subagents=SubagentConfig(max_agents=2),
    ),
    "hermes": HarnessConfig(
        style="hermes",
        interface={
            "shell": ToolFace(name="terminal", renamed={"timeout_s": "timeout"}),
            "read": ToolFace(
                name="read_file", renamed={"first_line": "offset", "num_lines": "limit"}
            ),
            "write": ToolFace(name="write_file"),
            "edit": ToolFace(name="patch", renamed={"old": "old_string", "new": "new_string"}),
            "search": ToolFace(name="search_files"),
            "remember": ToolFace(name="memory"),
            "delegate": ToolFace(name="delegate_task"),
            "skill": ToolFace(name="skill_view"),
            "submit": ToolFace(name="submit"),
        },
        context=ContextPolicy(compact_at_tokens=65536, method="summary", keep_turns=6),
        memory=MemoryConfig(),
        subagents=SubagentConfig(max_agents=3),
    ),
}


def style(name: str) -> HarnessConfig:
    """The configuration of that name. `ValueError` naming the nearest."""
    if name not in STYLES:
        raise ValueError(f"style={name!r}: unknown; {nearest(name, STYLES)}")
    return STYLES[name]


def draw_harness(
    seed: int, group: str, styles: Sequence[str] = tuple(STYLES), *, has_skills: bool = False
) -> HarnessConfig:
    """A harness for one task group: equal for equal arguments, in any process.

    The style is drawn, then what may vary within it: wording and order of the prompt, where it
    stands, how and when the context is shortened, the order of the tools, and, where there are
    skills, whether they are spelled out or looked up.
    """
    drawn = random.Random(f"{seed}/{group}")
    config = style(drawn.choice(list(styles)))
    sections: list[Section] = list(config.prompt.sections)
    drawn.shuffle(sections)
    kinds = list(config.interface)
    drawn.shuffle(kinds)
    max_tokens = config.context.max_tokens
    ways: list[Literal["off", "on demand", "spelled out"]] = ["spelled out"]
    if "skill" in config.interface:
        ways.append("on demand")
    return replace(
        config,
        interface={kind: config.interface[kind] for kind in kinds},
        prompt=PromptConfig(
            sections=tuple(sections),
            wording=drawn.randrange(len(WORDINGS["role"])),
            in_user_message=drawn.random() < 0.25,
        ),
        context=ContextPolicy(
            max_tokens=max_tokens,
            compact_at_tokens=int(max_tokens * drawn.uniform(0.4, 0.9)),
            method=drawn.choice(["summary", "clear"]),
            keep_turns=drawn.randrange(1, 7),
        ),
        skills=drawn.choice(ways) if has_skills else "off",
        max_observation_chars=drawn.choice([8000, 20000, 40000]),
    )
