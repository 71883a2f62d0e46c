"""The soak of `bench/serve_soak.py`, shortened."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "serve_soak.py"


def soaked(nano_dir: Path, out: Path, minutes: float) -> dict[str, Any]:
    words = [sys.executable, PROGRAM, "--minutes", str(minutes), "--checkpoint", nano_dir]
    done = subprocess.run(
        [*words, "--clients", "6", "--commit", "test", "--out", out],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def test_a_server_under_mixed_load_loses_and_leaks_nothing(nano_dir: Path, tmp_path: Path) -> None:
    result = soaked(nano_dir, tmp_path / "result.json", 0.05)
    assert result["faults"] == [] and result["outcomes"]["answered"] > 0


@pytest.mark.slow
def test_a_minute_of_mixed_load_has_every_kind_of_call(nano_dir: Path, tmp_path: Path) -> None:
    result = soaked(nano_dir, tmp_path / "result.json", 1.0)
    assert result["faults"] == []
    assert {"answered", "refused", "left"} <= set(result["outcomes"])
    assert result["time_to_first_token"]["p99_ms"] > 0.0 < result["time_per_token"]["p99_ms"]
