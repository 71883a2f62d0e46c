"""Harnesses: modules composed by a configuration, styles, and drawing one per group."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from agents.worlds import repair_task

from baltoro.agents.failure import HarnessError
from baltoro.agents.harness import (
    Harness,
    HarnessConfig,
    MemoryConfig,
    PromptConfig,
    Skill,
    ToolFace,
)
from baltoro.agents.styles import STYLES, draw_harness, style
from baltoro.agents.tools import tool_of
from baltoro.config import digest, from_dict, to_dict

SKILL = Skill(name="tests", summary="how tests are run", body="python3 -m unittest")


async def nothing(command: str, timeout_s: int = 60) -> str:
    """Do nothing."""
    return command


def test_the_interface_decides_names_parameters_and_order():
    box = Harness(style("claude-code")).toolbox({"shell": nothing})
    (declaration,) = box.declarations()
    assert declaration["function"]["name"] == "Bash"
    assert set(declaration["function"]["parameters"]["properties"]) == {"command", "timeout"}


def test_tools_of_other_origin_come_after_and_may_not_clash():
    extra = tool_of(nothing, name="extra")
    box = Harness(style("plain"), tools=[extra]).toolbox({"shell": nothing})
    names = [each["function"]["name"] for each in box.declarations()]
    assert names == ["shell", "extra"]
    clash = Harness(style("plain"), tools=[tool_of(nothing, name="shell")])
    with pytest.raises(HarnessError, match="two are named 'shell'"):
        clash.toolbox({"shell": nothing})


def test_the_opening_holds_the_place_the_notes_and_the_task():
    config = replace(style("openclaw"), prompt=PromptConfig(wording=1))
    system, user = Harness(config).opening(repair_task(), "the bug is in add")
    assert "/work" in system["content"]
    assert "the bug is in add" in system["content"]
    assert user == {"role": "user", "content": repair_task().prompt}


def test_the_prompt_may_stand_in_the_users_message():
    config = replace(style("plain"), prompt=PromptConfig(in_user_message=True))
    (only,) = Harness(config).opening(repair_task(), None)
    assert only["role"] == "user"
    assert only["content"].endswith(repair_task().prompt)


def test_sections_come_in_the_order_that_is_asked_for():
    texts = []
    for sections in (("role", "place"), ("place", "role")):
        config = replace(style("plain"), prompt=PromptConfig(sections=sections))
        texts.append(Harness(config).opening(repair_task(), None)[0]["content"].split("\n\n"))
    assert texts[0] == texts[1][::-1]


def test_skills_are_spelled_out_or_listed_with_the_tool_that_reads_them():
    spelled = Harness(replace(style("plain"), skills="spelled out"), skills=[SKILL])
    assert SKILL.body in spelled.opening(repair_task(), None)[0]["content"]
    listed = Harness(replace(style("hermes"), skills="on demand"), skills=[SKILL])
    text = listed.opening(repair_task(), None)[0]["content"]
    assert "- tests: how tests are run" in text
    assert "`skill_view`" in text
    assert SKILL.body not in text


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"interface": {"fly": ToolFace(name="fly")}}, r"\['fly'\]: not among"),
        (
            {"interface": {"read": ToolFace(name="x"), "write": ToolFace(name="x")}},
            "must differ",
        ),
        ({"memory": MemoryConfig()}, "lacks 'remember'"),
        ({"skills": "on demand"}, "lacks 'skill'"),
        ({"max_turns": 0}, "max_turns=0"),
    ],
)
def test_a_harness_that_contradicts_itself_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        replace(style("plain"), **changes)


def test_skills_must_be_there_if_they_are_used():
    with pytest.raises(ValueError, match="give skills"):
        Harness(replace(style("plain"), skills="spelled out"))


def test_an_unknown_style_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'codex'"):
        style("codx")


@pytest.mark.parametrize("name", STYLES)
def test_every_style_is_a_configuration_that_survives_json(name):
    text = json.dumps(to_dict(STYLES[name]))
    assert from_dict(HarnessConfig, json.loads(text)) == STYLES[name]
    assert STYLES[name].style == name
    assert "submit" in STYLES[name].interface


def test_a_group_has_one_harness_and_groups_differ():
    drawn = [draw_harness(1, f"group {index}") for index in range(60)]
    assert draw_harness(1, "group 0") == drawn[0]
    assert draw_harness(2, "group 0") != drawn[0]
    assert {config.style for config in drawn} == set(STYLES)
    assert len({digest(config) for config in drawn}) > 50
    assert {config.context.method for config in drawn} == {"summary", "clear"}
    assert {config.prompt.in_user_message for config in drawn} == {True, False}
    assert {config.skills for config in drawn} == {"off"}


def test_drawing_uses_skills_only_where_there_are_some():
    ways = {draw_harness(1, f"{index}", has_skills=True).skills for index in range(60)}
    assert ways == {"spelled out", "on demand"}


def test_drawing_is_the_same_in_another_process():
    code = (
        "from baltoro.agents.styles import draw_harness; from baltoro.config import digest;"
        "print(digest(draw_harness(7, 'g')))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == digest(draw_harness(7, "g"))
