"""What `baltoro bench tune` tries for the layers: KDA, its decode step, experts, mixed residuals.

Sizes are those of the larger presets and of K3. Scans and experts run together with what stands
around them, since a shape that is good for one kernel may cost the next one time.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .attn_res import attn_res_mix
from .kda.decode import DecodeInputs, DecodeWeights, StatePool, decode_kda
from .kda.fused import chunk_kda_fused
from .launch_table import Launch, dtype_class
from .moe import moe_experts, moe_experts_mxfp4
from .mxfp4 import Mxfp4Tensor
from .tune_case import BF16, Case, named, normal

FP32 = torch.float32
BOUND = -5.0
CHUNK = 64
PREP_SIZES = ((96, 8192, 128), (32, 8192, 64))  # heads, tokens, head dim
SCAN_SIZES = (
    (4, 8192),
    (6, 8192),
    (8, 4096),
    (8, 32768),
    (16, 4096),
    (16, 8192),
    (16, 32768),
    (32, 8192),
    (32, 32768),
)  # heads, tokens of one sequence
PORTABLE_SIZE = (4, 2048, 128)
SMALL_EXPERTS = (64, 6, 384, 448)  # experts, active ones, latent and inner width
K3_EXPERTS = (112, 16, 3584, 3072)  # an eighth of them
MIXED = ((9, 7168, "wider"), (9, 2048, "w2048"), (5, 768, "w768"))  # sources, width, class
MIXED_ROWS = ((5, 768, "w1024"), (9, 2048, "w2048"), (9, 7168, "w8192"))
MIX_TOKENS = 8192

Run = Callable[[], Sequence[Tensor]]


def kda_cases(device: torch.device) -> Iterator[Callable[[], Case]]:
    """The Hopper kernels: registers of the first one, and how scans of few heads are cut."""
    for size in PREP_SIZES:
        yield partial(prep_case, *size, device)
    for heads, tokens in SCAN_SIZES:
        yield partial(segments_case, heads, tokens, device)
    yield partial(fold_case, device)


def prep_case(heads: int, tokens: int, dim: int, device: torch.device) -> Case:
    return Case(
        kernel="kda_prep_sm90",
        shape_class=f"k{dim}",
        run=_kda_runs(heads, tokens, dim, BF16, BOUND, device)[0],
        candidates=named("maxnreg", [128], [152], [168], [208], [255]),
    )


def segments_case(heads: int, tokens: int, device: torch.device) -> Case:
    """Programs at once, and chunks of a segment; of one program is nothing left to cut."""
    programs, chunks = 2 * heads, tokens // CHUNK
    return Case(
        kernel="kda_segments",
        shape_class=f"p{max(8, 1 << (programs - 1).bit_length())} c{min(256, chunks)}",
        run=_kda_runs(heads, tokens, 128, BF16, BOUND, device)[1],
        candidates=named("programs chunks", [1, 8], *product((66, 132, 264), (8, 16))),
    )


def fold_case(device: torch.device) -> Case:
    """As many segments as there can be."""
    return Case(
        kernel="kda_fold",
        shape_class="fp32",
        run=_kda_runs(4, 32768, 128, BF16, BOUND, device)[1],
        candidates=named(
            "columns num_warps num_stages", [16, 4, 2], [16, 8, 1], [16, 8, 3], [32, 8, 2]
        ),
    )


def portable_cases(device: torch.device) -> Iterator[Callable[[], Case]]:
    """Kernels for fp32 and, of KDA, in bf16 for gates without a bound.

    No more than two warps there: of the many products that a group of four has in fp32, ptxas of
    CUDA 12.8 loses addresses (a scan by eight warps read outside of its memory).
    """
    for kernel, candidates, which in (
        ("kda_prep", named("columns num_warps", [16, 1], [32, 1], [32, 2]), 0),
        ("kda_row_gradients", named("values num_warps", [16, 1], [16, 2], [32, 2], [64, 2]), 1),
        ("kda_gradients", named("columns values num_warps", [16, 32, 2], [16, 128, 2]), 1),
    ):
        for dtype in (BF16, FP32):
            yield partial(portable_case, kernel, candidates, which, dtype, device)
    for way, (num_sources, width, name) in product(("forward", "backward"), MIXED_ROWS):
        yield partial(mix_case, way, num_sources, width, name, device, FP32)


def portable_case(
    kernel: str,
    candidates: Sequence[Launch],
    which: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    """In the forward pass alone (`which` 0) or in both (1)."""
    bound = None if dtype is BF16 else BOUND
    runs = _kda_runs(*PORTABLE_SIZE, dtype, bound, device)
    return Case(
        kernel=kernel, shape_class=dtype_class(dtype), run=runs[which], candidates=candidates
    )


def _kda_runs(
    heads: int,
    tokens: int,
    dim: int,
    dtype: torch.dtype,
    bound: float | None,
    device: torch.device,
) -> tuple[Run, Run]:
    """The forward pass of one sequence from raw inputs, and both passes."""
    q, k, v, g, do = (normal(tokens, heads, dim, device=device, dtype=dtype) for _ in range(5))
    beta = normal(tokens, heads, device=device, dtype=dtype)
    a_log = torch.zeros(heads, device=device)
    dt_bias = torch.full((heads * dim,), -4.0, device=device)
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    chunk_kda_fused(
        q[:1], k[:1], v[:1], g[:1], beta[:1], a_log, dt_bias,
        cu_seqlens=bounds.clamp(max=1), gate_lower_bound=bound, impl="triton",
    )  # fmt: skip
    operators: Any = torch.ops.baltoro

    def forward() -> list[Tensor]:
        found: list[Tensor] = operators.chunk_kda_forward(
            q, k, v, g, beta, bounds, None, a_log, dt_bias, bound, True, 1e-6, True
        )
        return found

    def both() -> list[Tensor]:
        o, final_state, *saved = forward()
        grads = operators.chunk_kda_backward(
            q, k, v, g, beta, bounds, a_log, dt_bias, o, saved, do, None, bound, True
        )
        return [o, final_state, *grads]

    return lambda: forward()[:2], both


def decode_cases(device: torch.device) -> Iterator[Callable[[], Case]]:
    for dtype, num_tokens in product((FP32, BF16), (1, 4)):
        yield partial(decode_case, 96, 128, 128, dtype, num_tokens, device)
    for dtype in (FP32, BF16):
        yield partial(decode_case, 32, 64, 128, dtype, 1, device)


def decode_case(
    heads: int, dim: int, batch: int, dtype: torch.dtype, num_tokens: int, device: torch.device
) -> Case:
    """States that neither decay nor take anything in, and equal tokens: all runs find the same."""
    T, C = batch * num_tokens, 3 * heads * dim
    projected = normal(1, C, device=device)
    inputs = DecodeInputs(
        projected=projected.repeat(T, 1),
        decay_logits=torch.full((T, heads, dim), -1e4, dtype=BF16, device=device),
        beta_logits=torch.full((T, heads), -1e4, dtype=BF16, device=device),
        gate_logits=normal(T, heads, dim, device=device),
    )
    weights = DecodeWeights(
        conv=normal(C, 4, device=device, dtype=FP32),
        A_log=torch.zeros(heads, device=device),
        dt_bias=torch.zeros(heads * dim, device=device),
        norm=torch.ones(dim, device=device),
    )
    pool = StatePool(
        windows=projected[:, :, None].repeat(batch + 1, 1, 3),
        states=normal(batch + 1, heads, dim, dim, device=device, dtype=dtype),
    )
    slots = torch.arange(1, batch + 1, dtype=torch.int32, device=device)
    bounds = torch.arange(0, T + 1, num_tokens, dtype=torch.int32, device=device)

    def run() -> list[Tensor]:
        y = decode_kda(
            inputs, weights, pool, slots, cu_seqlens=None if num_tokens == 1 else bounds,
            gate_lower_bound=BOUND, norm_eps=1e-5, impl="triton",
        )  # fmt: skip
        return [y, pool.states[-1]]

    few = named("num_warps", [1], [2], [4]) if dim == 64 else named("num_warps", [4], [8])
    bounded = named("num_warps maxnreg", [2, 128] if dim == 64 else [4, 168])
    kind = "one" if num_tokens == 1 else "more"
    return Case(
        kernel="kda_decode",
        shape_class=f"{dtype_class(dtype)} d{dim} {kind}",
        run=run,
        candidates=[*few, *bounded],
    )


def moe_cases(device: torch.device) -> Iterator[Callable[[], Case]]:
    """Weights of bf16 as `small` has them, packed ones as K3."""
    for sizes, is_packed in ((SMALL_EXPERTS, False), (K3_EXPERTS, True)):
        for mean in (None, 2, 6, 12, 28, 40, 64, 128):
            yield partial(moe_case, sizes, is_packed, mean, device)


def moe_case(
    sizes: tuple[int, int, int, int], is_packed: bool, mean: int | None, device: torch.device
) -> Case:
    """One token, or as many that an expert has `mean` in the mean."""
    E, A, Z, F = sizes
    T = 1 if mean is None else mean * E // A
    x = normal(T, Z, device=device)
    ids = torch.rand(T, E, device=device).argsort(-1)[:, :A]
    weights = torch.rand(T, A, device=device)
    shapes = ((E, 2 * F, Z), (E, Z, F))
    caps: Any = {"activation": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0}
    run: Callable[..., Tensor] = moe_experts_mxfp4 if is_packed else moe_experts
    if is_packed:
        experts: list[Any] = [_packed(shape, device) for shape in shapes]
    else:
        experts = [normal(*shape, device=device) * shape[-1] ** -0.5 for shape in shapes]
    kind = "single" if mean is None else "more" if mean > 64 else f"t{mean}"
    return Case(
        kernel="moe_few",
        shape_class=f"{'mxfp4' if is_packed else 'bf16'} {kind}",
        run=torch.no_grad()(lambda: [run(x, ids, weights, *experts, **caps, impl="triton")]),
        candidates=_tiles(is_packed, mean or 1),
    )


def _packed(shape: tuple[int, int, int], device: torch.device) -> Mxfp4Tensor:
    """Any codes, and scales near that of 1 / sqrt(inputs)."""
    *rows, width = shape
    codes = torch.randint(0, 256, (*rows, width // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(118, 122, (*rows, width // 32), dtype=torch.uint8, device=device)
    return Mxfp4Tensor(codes, scale)


def _tiles(is_packed: bool, mean: int) -> list[Launch]:
    """Rows, inputs, warps and stages; a slot of the class's tokens, and one of half as many."""
    names = "rows tokens inputs num_warps num_stages"
    tokens = next(size for size in (8, 16, 32, 64) if mean <= 0.9 * size or size == 64)
    shapes: tuple[tuple[int, int, int, int], ...]
    if not is_packed:
        shapes = ((32, 64, 2, 4), (64, 64, 2, 4), (64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 4, 3))
    elif tokens <= 16:
        shapes = ((64, 256, 2, 3), (64, 256, 4, 3), (128, 256, 4, 2), (64, 128, 2, 4))
    else:
        shapes = ((128, 64, 4, 3), (128, 128, 4, 3), (64, 128, 4, 3))
    found = [(rows, tokens, *rest) for rows, *rest in shapes]
    if tokens > 16:
        found += [(rows, tokens // 2, *rest) for rows, *rest in shapes[-2:]]
    return named(names, *found)


def attn_res_cases(device: torch.device) -> Iterator[Callable[[], Case]]:
    for num_sources, width, name in MIXED:
        for way in ("forward", "backward"):
            yield partial(mix_case, way, num_sources, width, name, device)


RING = "num_warps pairs slots programs"
RINGS: dict[str, list[Launch]] = {
    "forward wider": named(RING, [4, 512, 14, 1], [4, 512, 15, 1], [8, 1024, 13, 1]),
    "forward w2048": named(RING, [4, 512, 7, 5], [4, 512, 10, 5], [4, 512, 13, 4], [2, 256, 10, 5]),
    "forward w768": named(RING, [1, 128, 7, 18], [1, 128, 8, 16], [1, 128, 10, 13]),
    "backward wider": named(
        f"{RING} spare group",
        [8, 1024, 14, 1, 1, 1], [8, 1024, 14, 1, 1, 2], [4, 512, 15, 1, 1, 3],
    ),
    "backward w2048": named(
        f"{RING} spare group",
        [4, 512, 11, 4, 1, 3], [4, 512, 18, 3, 2, 3], [4, 512, 15, 3, 2, 1], [4, 512, 15, 3, 2, 2],
    ),
    "backward w768": named(
        f"{RING} spare group",
        [1, 128, 4, 16, 1, 1], [1, 128, 4, 15, 2, 1], [1, 128, 4, 14, 3, 1], [1, 128, 4, 12, 2, 2],
    ),
}  # fmt: skip


ROW = "num_warps ahead held held_warps"
ROWS: dict[str, list[Launch]] = {
    "w1024": named(ROW, [2, 1, 5120, 2], [2, 2, 1, 2], [2, 3, 1, 2], [4, 2, 1, 4]),
    "w2048": named(ROW, [4, 2, 20480, 8], [4, 1, 1, 4], [4, 3, 1, 4], [8, 2, 1, 8]),
    "w8192": named(ROW, [8, 1, 1, 8], [16, 1, 1, 16], [16, 2, 1, 16]),
}


def mix_case(
    way: str,
    num_sources: int,
    width: int,
    name: str,
    device: torch.device,
    dtype: torch.dtype = BF16,
) -> Case:
    """Rows of bf16 go through the ring."""
    *sources, d_out = (
        normal(MIX_TOKENS, width, device=device, dtype=dtype) for _ in range(num_sources + 1)
    )
    norm, proj = (normal(width, device=device, dtype=dtype) for _ in range(2))
    attn_res_mix([sources[0][:1]], norm, proj, eps=1e-5, impl="triton")
    operators: Any = torch.ops.baltoro
    _, stats = operators.attn_res_forward(sources, norm, proj, 1e-5, True)
    runs: dict[str, Run] = {
        "forward": lambda: operators.attn_res_forward(sources, norm, proj, 1e-5, True),
        "backward": lambda: operators.attn_res_backward(sources, norm, proj, stats, d_out),
    }
    return Case(
        kernel=f"attn_res_{'ring_' if dtype is BF16 else ''}{way}",
        shape_class=name,
        run=runs[way],
        candidates=RINGS[f"{way} {name}"] if dtype is BF16 else ROWS[name],
    )
