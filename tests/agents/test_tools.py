"""Plain functions as tools: the schema a model sees, and errors it can read."""

import asyncio

import pytest

from baltoro.agents.tools import Observation, Tool, Toolbox, shortened, tool_of
from baltoro.sandbox.protocol import SandboxError


async def cut(path: str, first: int = 1, words: list[str] | None = None) -> str:
    """Show a part
    of a file.

    path: where it is
    first: the first line
    """
    if path == "missing":
        raise FileNotFoundError(path)
    if path == "dead":
        raise SandboxError("the machine is gone")
    return f"{path}:{first}:{words}"


def call(tool: Tool, arguments: str) -> Observation:
    return asyncio.run(Toolbox([tool]).call(tool.name, arguments))


def test_the_schema_comes_from_the_signature_and_the_docstring():
    declaration = tool_of(cut).declaration()["function"]
    assert declaration["name"] == "cut"
    assert declaration["description"] == "Show a part of a file."
    schema = declaration["parameters"]
    assert schema["required"] == ["path"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["path"] == {"type": "string", "description": "where it is"}
    assert schema["properties"]["first"]["default"] == 1


def test_a_call_reaches_the_function_with_its_defaults():
    assert call(tool_of(cut), '{"path": "a", "words": ["x"]}').content == "a:1:['x']"


def test_a_renamed_parameter_is_declared_and_called_under_its_new_name():
    tool = tool_of(cut, name="Read", renamed={"path": "file_path"})
    assert tool.parameters["required"] == ["file_path"]
    assert tool.parameters["properties"]["file_path"]["description"] == "where it is"
    assert call(tool, '{"file_path": "a"}').content == "a:1:None"
    assert call(tool, '{"path": "a"}').is_error


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("{}", "argument 'path': Field required"),
        ('{"path": 3}', "argument 'path': Input should be a valid string"),
        ('{"path": "a", "first": "2"}', "argument 'first'"),
        ('{"path": "a", "extra": 1}', "argument 'extra'"),
        ("not json", "arguments are not JSON"),
        ("[1]", "must be a JSON object, not list"),
        ('{"path": "missing"}', "FileNotFoundError: missing"),
    ],
)
def test_what_the_model_gets_wrong_is_an_observation(arguments, complaint):
    seen = call(tool_of(cut), arguments)
    assert seen.is_error
    assert complaint in seen.content


def test_a_machine_failure_is_raised():
    with pytest.raises(SandboxError):
        call(tool_of(cut), '{"path": "dead"}')


def test_an_unknown_tool_is_answered_with_the_nearest():
    seen = asyncio.run(Toolbox([tool_of(cut)]).call("cutt", "{}"))
    assert seen.is_error
    assert "did you mean 'cut'" in seen.content


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two are named 'cut'"):
        Toolbox([tool_of(cut), tool_of(cut)])


def test_a_signature_without_a_schema_is_refused():
    async def untyped(x) -> str:  # type: ignore[no-untyped-def]
        return x

    async def open_ended(*words: str) -> str:
        return ""

    with pytest.raises(ValueError, match="'x' has no annotation"):
        tool_of(untyped)
    with pytest.raises(ValueError, match=r"\*words"):
        tool_of(open_ended)
    with pytest.raises(ValueError, match="has no parameter"):
        tool_of(cut, renamed={"pth": "p"})


def test_a_long_text_keeps_both_ends_and_says_what_is_missing():
    text = "a" * 50 + "b" * 50
    cut_text = shortened(text, 20)
    assert cut_text.startswith("a" * 10 + "\n[... 80 characters left out")
    assert cut_text.endswith("b" * 10)
    assert shortened(text, 100) == text
