"""Run a script of Triton kernels in Triton's interpreter, on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

needs_interpreter = pytest.mark.skipif(
    numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0",
    reason="Triton's interpreter takes one-element arrays for numbers, which numpy 2.4 refuses",
)


def assert_runs_interpreted(script: str) -> None:
    """`script` ends well in a process of its own, since the choice is made at Triton's import."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root / "tests"), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
