"""The peer of `serve_gpu` as a process beside it."""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from serve_shapes import Sizes

import baltoro
from baltoro.model.model import Model

Json = dict[str, Any]


class Peer:
    """transformers on the weights of `model`, in a process of its own that gets ready beside us."""

    def __init__(self, model: Model, sizes: Sizes, python: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.out, self.go, self.log = (Path(self.folder.name) / n for n in ("out", "go", "log"))
        baltoro.save(model, Path(self.folder.name) / "model")
        words = [python, Path(__file__).parent / "serve_peer.py"]
        words += [Path(self.folder.name) / "model", "--out", self.out, "--go", self.go]
        words += ["--device", model.lm_head.weight.device.type, "--batches", *sizes.batches]
        words += ["--prompt-tokens", sizes.peer_prompt, "--new-tokens", sizes.peer_new]
        words += ["--prefill-tokens", sizes.prefill_tokens]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(word) for word in words],
                stdout=log,
                stderr=log,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )

    def found(self) -> Json:
        """What it wrote so far."""
        try:
            return json.loads(self.out.read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # not yet, or being written
            return {}

    def wait_ready(self, limit_s: float) -> float:
        """Until it has built its kernels and leaves the GPU alone; the seconds that took."""
        start = time.perf_counter()
        while self.process.poll() is None and not self.found().get("is_ready"):
            if time.perf_counter() - start > limit_s:
                break
            time.sleep(0.2)
        return time.perf_counter() - start

    def measure(self, limit_s: float) -> Json:
        """Let it measure; what it found, and its last words if it did not end well."""
        self.go.touch()
        try:
            is_well = self.process.wait(max(5.0, limit_s)) == 0
        except subprocess.TimeoutExpired:
            is_well = False
        return {**self.found(), "log": "" if is_well else self.log.read_text()[-1500:]}

    def end(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()
