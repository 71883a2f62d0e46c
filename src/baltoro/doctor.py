"""`baltoro doctor`: what this machine offers, and which implementation of each operator will run.

The answer for an operator is found by running it once on a few numbers, not from a list of what
ought to work: an implementation that cannot serve the call says why.
"""

import importlib.metadata
import json as json_format
import os
import platform
import re
from dataclasses import fields
from typing import Any

import torch

import baltoro
from baltoro.model.config import ImplConfig
from baltoro.ops.attn_res import attn_res_mix
from baltoro.ops.cross_entropy import linear_cross_entropy
from baltoro.ops.impl import ImplError
from baltoro.ops.kda import chunk_kda
from baltoro.ops.kda.decode import DecodeInputs, DecodeWeights, StatePool, decode_kda
from baltoro.ops.mla import varlen_attention
from baltoro.ops.mla.paged import paged_latent_attention
from baltoro.ops.moe import moe_experts, route
from baltoro.ops.rms_norm import rms_norm
from baltoro.ops.short_conv import short_conv
from baltoro.ops.situ import situ_glu

IMPLS = ("reference", "torch", "triton")
PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "tiktoken", "pillow", "tyro")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")
NOTES = {
    "operators": "(first what the configuration names by default; hardware chooses nothing)",
    "extras": "(optional dependencies)",
}


def doctor(*, json: bool = False) -> None:
    """Print what this machine offers and what will run on it.

    An operator's implementation is named by the model's configuration. Each is run here once: first
    the one that a configuration names by default, then the others.

    Args:
        json: print one JSON object, for a bug report or a script
    """
    report = {"machine": machine(), "operators": operators(device()), "extras": extras()}
    if json:
        print(json_format.dumps(report, indent=2))
        return
    for section, entries in report.items():
        print(f"{section} {NOTES.get(section, '')}".rstrip())
        width = max(map(len, entries), default=0)
        for name, value in entries.items():
            print(f"  {name:<{width}}  {value}")


def device() -> torch.device:
    """The first CUDA device if torch sees one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> dict[str, str]:
    """Device, memory and versions, as words: what a measurement must be quoted with."""
    found = {
        "baltoro": baltoro.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "threads": f"{torch.get_num_threads()} used by torch, of {os.cpu_count()} cores",
        "memory": _memory(),
        "gpu": _gpu(),
    }
    for package in PACKAGES:
        found[package] = _version(package) or "absent"
    return found


def operators(device: torch.device) -> dict[str, str]:
    """For every field of `ImplConfig`: what will run on `device`, and what else could.

    The choice is the configuration's; nothing is chosen from the hardware, and an implementation
    that refuses is reported with its reason.
    """
    chosen = ImplConfig()
    found = {}
    for field in fields(ImplConfig):
        impl = getattr(chosen, field.name)
        refusal = _refusal(field.name, impl, device)
        words = [f"{impl} CANNOT run: {refusal}" if refusal else f"{impl} runs on {device.type}"]
        for other in IMPLS:
            if other != impl:
                refusal = _refusal(field.name, other, device)
                words.append(f"{other}: {refusal}" if refusal else f"{other} runs too")
        found[field.name] = "; ".join(words)
    return found


def extras() -> dict[str, str]:
    """The optional dependencies of the installed package: present, or how to get them."""
    try:
        metadata = importlib.metadata.metadata("baltoro")
        requirements = importlib.metadata.requires("baltoro") or []
    except importlib.metadata.PackageNotFoundError:
        return {"none": "baltoro runs from its sources and is not installed; see `make setup`"}
    found = {}
    for extra in metadata.get_all("Provides-Extra") or []:
        marker = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
        names = [re.split(r"[^\w.-]", line)[0] for line in requirements if marker.search(line)]
        missing = [name for name in names if _version(name) is None]
        get = f"missing {', '.join(missing)}: pip install 'baltoro[{extra}]'"
        found[extra] = get if missing else f"present ({', '.join(names)})"
    return found


def _refusal(op: str, impl: str, device: torch.device) -> str | None:
    """Run `op` once; None if it ran, else the reason it gave."""
    try:
        _run(op, impl, device)
    except ImplError as error:
        return "not written yet" if "is unknown" in str(error) else str(error)
    return None


def _run(op: str, impl: str, device: torch.device) -> None:
    """Call one operator on a few numbers; `op` is a field of `ImplConfig`."""
    x_TD = torch.full((2, 16), 0.5, device=device)
    x_THK = x_TD[:, None]
    weight = x_TD[0]
    bounds = torch.tensor([0, 2], dtype=torch.int32, device=device)
    zeros_T = torch.zeros(2, dtype=torch.int64, device=device)
    if op == "kda":
        beta_TH = x_TD[:, :1]
        chunk_kda(
            x_THK,
            x_THK,
            x_THK,
            -x_THK,
            beta_TH,
            cu_seqlens=bounds,
            gate_lower_bound=-5.0,
            impl=impl,
        )
    elif op == "kda_decode":
        inputs = DecodeInputs(x_TD.new_ones(2, 48), x_THK, x_TD[:, :1], x_THK)
        small = DecodeWeights(x_TD.new_ones(48, 4), weight[:1], weight, weight)
        pool = StatePool(x_TD.new_zeros(3, 48, 3), x_TD.new_zeros(3, 1, 16, 16))
        decode_kda(
            inputs,
            small,
            pool,
            torch.arange(1, 3, device=device),
            gate_lower_bound=-5.0,
            norm_eps=1e-5,
            impl=impl,
        )
    elif op == "short_conv":
        short_conv(x_TD, x_TD.new_ones(16, 4), cu_seqlens=bounds, impl=impl)
    elif op == "attention":
        ends = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        varlen_attention(x_THK, x_THK, x_THK, **ends, causal=True, scale=1.0, impl=impl)
    elif op == "attention_decode":
        table = torch.zeros(2, 1, dtype=torch.int32, device=device)
        lengths = torch.ones_like(table[:, 0])
        paged_latent_attention(x_THK, x_THK, table, lengths, kv_lora_rank=8, scale=1.0, impl=impl)
    elif op == "attn_res":
        attn_res_mix([x_TD, x_TD], weight, weight, eps=1e-5, impl=impl)
    elif op == "situ":
        situ_glu(x_TD, x_TD, beta=4.0, linear_beta=25.0, impl=impl)
    elif op == "rms_norm":
        rms_norm(x_TD, weight, eps=1e-5, impl=impl)
    elif op == "route":
        options: dict[str, Any] = {"renormalize": True, "scaling_factor": 1.0}
        route(x_TD, None, num_experts_per_token=1, activation="sigmoid", **options, impl=impl)
    elif op == "moe":
        gate_up, down = x_TD.new_ones(1, 32, 16), x_TD.new_ones(1, 16, 16)
        glu: dict[str, Any] = {"activation": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0}
        moe_experts(x_TD, zeros_T[:, None], x_TD[:, :1], gate_up, down, **glu, impl=impl)
    elif op == "cross_entropy":
        linear_cross_entropy(x_TD, x_TD, zeros_T, impl=impl)
    else:
        raise AssertionError(f"{op}: no way to run it here; add one")


def _cpu() -> str:
    words = [platform.processor() or platform.machine(), torch.backends.cpu.get_cpu_capability()]
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            text = file.read()
        name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        flags = set(re.findall(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)[:1])
        present = {flag for line in flags for flag in line.split()}
        words = [name.group(1) if name else words[0], f"torch uses {words[1]}"]
        words.append("has " + " ".join(flag for flag in CPU_FLAGS if flag in present))
    return ", ".join(words)


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{total / 2**30:.1f} GiB"


def _gpu() -> str:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        return f"none seen by torch ({'built for CUDA ' + built if built else 'a CPU build'})"
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"sm_{properties.major}{properties.minor}"
        names.append(f"{properties.name}, {capability}, {properties.total_memory / 2**30:.0f} GiB")
    return f"{'; '.join(names)}; CUDA {torch.version.cuda}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
