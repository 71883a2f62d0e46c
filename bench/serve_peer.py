"""How fast transformers writes with one model: `generate`, in a process of its own.

    python3 bench/serve_peer.py MODEL --out FILE [--device cuda] [--batches 1 32 256]

With `--go` it builds its kernels first, says so in FILE and begins to measure once that file is
there, so that another program can have the GPU to itself meanwhile.

MODEL is a Kimi-Linear checkpoint. Decode is the time that further tokens add to a call of
`generate`; prefill is one forward pass. fla's kernels are used where fla is importable. Of the
configurations that fla would try for each kernel the first is taken: trying them takes minutes.
That touches prefill alone, since its decode kernel has one. FILE is written after every figure.
"""

import argparse
import inspect
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear

try:
    from triton.runtime.autotuner import Autotuner
except ModuleNotFoundError:  # on a CPU machine, and then there is no fla either
    Autotuner = ()

Json = dict[str, Any]


def take_first_configurations() -> None:
    """Have each of fla's kernels run as the first of its configurations."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "fla" or module is None:
            continue
        for kernel in vars(module).values():
            while kernel is not None and not isinstance(kernel, type):
                if isinstance(kernel, Autotuner):
                    kernel.configs = kernel.configs[:1]
                kernel = getattr(kernel, "fn", None)


def implementation(name: str) -> str:
    """The module whose function stands behind `name` in transformers' file."""
    wrapped = getattr(modeling_kimi_linear, name)
    while "implementation" not in inspect.getclosurevars(wrapped).nonlocals:
        wrapped = wrapped.__wrapped__
    return inspect.getclosurevars(wrapped).nonlocals["implementation"].__module__


def seconds(run: Any, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


class Peer:
    """The model and what was found, written down as it comes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.result: Json = {"transformers": transformers.__version__, "decode": {}}
        dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
        self.model = model.to(arguments.device).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        self.result["kernels"] = {
            name: implementation(name)
            for name in ("recurrent_kimi_delta_attention", "chunk_kimi_delta_attention")
        }
        self.write()

    def write(self) -> None:
        self.arguments.out.write_text(json.dumps(self.result, indent=1))

    def ids(self, rows: int, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.model.config.vocab_size - 1, (rows, count), generator=generator)
        return ids.to(self.arguments.device)

    def generate(self, ids: torch.Tensor, count: int) -> torch.Tensor:
        with torch.inference_mode():
            return self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
            )

    def decode(self, rows: int) -> None:
        device, count = self.arguments.device, self.arguments.new_tokens
        ids = self.ids(rows, self.arguments.prompt_tokens)
        one = seconds(lambda: self.generate(ids, 1), device)
        many = seconds(lambda: self.generate(ids, 1 + count), device)
        self.result["decode"][str(rows)] = {
            "tokens_per_s": rows * count / (many - one),
            "step_ms": (many - one) / count * 1e3,
        }
        self.write()

    def warm_up(self, rows: int) -> None:
        ids = self.ids(rows, self.arguments.prompt_tokens)
        first = self.generate(ids, 3)
        if rows == 1:
            self.result["first_ids"] = first[0, ids.shape[1] :].tolist()
            self.forward()

    def forward(self) -> None:
        with torch.inference_mode():
            ids = self.ids(1, self.arguments.prefill_tokens)
            self.model(ids, use_cache=True, logits_to_keep=1)

    def wait(self) -> None:
        self.result["is_ready"] = True
        self.write()
        while self.arguments.go is not None and not self.arguments.go.exists():
            time.sleep(0.1)

    def prefill(self) -> None:
        count = self.arguments.prefill_tokens
        best = min(seconds(self.forward, self.arguments.device) for _ in range(3))
        self.result["prefill"] = {"tokens": count, "tokens_per_s": count / best}
        self.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prefill-tokens", type=int, default=4096)
    parser.add_argument("--go", type=Path, help="wait for this file before measuring")
    arguments = parser.parse_args()
    take_first_configurations()
    peer = Peer(arguments)
    for name, run in [
        *((f"first call at batch {n}", lambda n=n: peer.warm_up(n)) for n in arguments.batches),
        ("wait", peer.wait),
        *((f"decode at batch {n}", lambda n=n: peer.decode(n)) for n in arguments.batches),
        ("prefill", peer.prefill),
    ]:
        try:
            run()
        except Exception:  # a figure that fails must not cost the others
            peer.result.setdefault("errors", {})[name] = traceback.format_exc()[-1500:]
            peer.write()


if __name__ == "__main__":
    main()
