"""A failure has an address: the five boundaries of an episode and one error for each.

An error of these classes is a **machine failure**: nobody's reward, recorded and not judged. What
an agent does wrong (bad arguments, a crashing command, no turns left) is never an exception: it is
an observation or an ending.
"""

from dataclasses import dataclass
from typing import Literal

from baltoro.sandbox.protocol import SandboxError

Boundary = Literal["policy", "harness", "tool", "task", "sandbox"]


class PolicyError(Exception):
    """The policy gave no reply: the endpoint is down, refuses, or answers nonsense."""


class HarnessError(Exception):
    """The harness cannot run as configured."""


class ToolError(Exception):
    """A tool's own machinery failed, for example its server died."""


class TaskError(Exception):
    """The task itself is broken: a missing image, a verifier that cannot run."""


BOUNDARIES: dict[type[Exception], Boundary] = {
    PolicyError: "policy",
    HarnessError: "harness",
    ToolError: "tool",
    TaskError: "task",
    SandboxError: "sandbox",
}
MACHINE_ERRORS = tuple(BOUNDARIES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A machine failure as it is recorded."""

    boundary: Boundary
    error: str  # class name
    message: str


def failure_of(error: Exception) -> Failure:
    """Attribute an error of `MACHINE_ERRORS`. Any other is our own bug: `TypeError`."""
    for kind, boundary in BOUNDARIES.items():
        if isinstance(error, kind):
            return Failure(boundary=boundary, error=type(error).__name__, message=str(error))
    raise TypeError(f"{error!r} belongs to no boundary")
