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


# The interpreter keeps bf16 in uint16 and would multiply those.
WIDE_PRODUCTS = """
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

product = InterpreterBuilder.create_dot


def wide_product(self, a, b, *rest):
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return product(self, a, b, *rest)


InterpreterBuilder.create_dot = wide_product
"""


def assert_runs_interpreted(script: str) -> None:
    """`script` ends well in a process of its own, since the choice is made at Triton's import."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root / "tests"), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", WIDE_PRODUCTS + script],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
