"""Logits of a checkpoint by another implementation; run by the Python of the interop environment.

    python foreign_logits.py transformers|mlx CHECKPOINT IDS.safetensors LOGITS.safetensors

Reads `input_ids` int64 `[B, T]` and writes `logits` fp32 `[B, T, W]`. It computes in fp32 whatever
the checkpoint stores, and knows nothing of baltoro.
"""

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def transformers_logits(checkpoint: Path, input_ids: np.ndarray) -> np.ndarray:
    import torch
    from transformers import KimiLinearForCausalLM

    model, report = KimiLinearForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    if any(report.values()):
        sys.exit(f"transformers did not take every tensor: {report}")
    with torch.inference_mode():
        return model(torch.from_numpy(input_ids)).logits.numpy()


def mlx_logits(checkpoint: Path, input_ids: np.ndarray) -> np.ndarray:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(checkpoint, strict=True)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array(input_ids)).astype(mx.float32))


if __name__ == "__main__":
    implementation, checkpoint, ids_path, logits_path = sys.argv[1:]
    function = {"transformers": transformers_logits, "mlx": mlx_logits}[implementation]
    logits = function(Path(checkpoint), load_file(ids_path)["input_ids"])
    save_file({"logits": np.ascontiguousarray(logits)}, logits_path)
