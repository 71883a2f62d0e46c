"""schemathesis draws requests from the OpenAPI document, good ones and bad ones."""

import re
import subprocess
from pathlib import Path

import pytest
from serve.api import listening, made

from baltoro.checkpoint.fixture import fixture
from baltoro.checkpoint.load import load

pytestmark = pytest.mark.interop

PROGRAM = Path(__file__).parents[2] / ".venv-interop" / "bin" / "schemathesis"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"


def test_no_request_that_the_document_allows_or_forbids_is_answered_with_a_500(
    tmp_path: Path,
) -> None:
    fixture(str(tmp_path / "nano"), preset="nano")
    server = made(load(tmp_path / "nano"), max_new_tokens=4)
    with listening(server) as address:
        words = [PROGRAM, "run", f"{address}openapi.json", "--url", address.rstrip("/")]
        options = ["--checks", CHECKS, "--max-examples", "12", "--seed", "1", "--no-shrink"]
        done = subprocess.run(
            [*words, *options, "--phases", "examples,coverage,fuzzing", "--workers", "1"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            timeout=600,
        )
        assert server.background.is_alive
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    counts = re.search(r"(\d+) generated", done.stdout)
    assert counts and int(counts[1]) > 200, done.stdout[-3000:]
