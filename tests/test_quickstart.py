"""`make quickstart` as it is written, on a run of two steps."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baltoro.checkpoint.load import load

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


@pytest.mark.skipif(
    shutil.which("make") is None or not (BIN / "baltoro").is_file(),
    reason="needs make, and baltoro installed beside this Python",
)
def test_quickstart_trains_reports_generates_and_leaves_a_checkpoint(tmp_path):
    done = subprocess.run(
        ["make", "quickstart", f"BIN={BIN}", "READY=", f"START={tmp_path}", "TOKENS=4096"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "an interpolated bigram fitted on the same tokens" in done.stdout
    assert "step 2: held out" in done.stdout
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()
    model = load(tmp_path / "run" / "best")
    assert model.tokenizer is not None and model.processor is not None
