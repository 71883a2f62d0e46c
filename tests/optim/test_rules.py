"""The structure of every parameter of our models, and the table made of it."""

import pytest
import torch
from model.tiny import VISION, tiny_k3, tiny_kimi_linear

from baltoro.model.config import ModelConfig
from baltoro.model.model import Model
from baltoro.optim.assignment import Assignment, AssignmentRow, assign
from baltoro.optim.rules import KdaHeads, Mixer, MlaHeads, k3_structure
from baltoro.optim.structure import Elementwise, MatrixBlocks

KDA = KdaHeads(num_heads=96, head_dim=128)
MLA = MlaHeads(
    num_heads=96, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
MIXERS = {"layers.0.self_attn": KDA, "layers.3.self_attn": MLA, "mtp_layers.0.self_attn": MLA}
D = 7168

# name, shape, the matrices (None: AdamW)
K3_TABLE = [
    ("embed_tokens.weight", (163840, D), None),
    ("lm_head.weight", (163840, D), None),
    ("norm.weight", (D,), None),
    ("output_attn_res_norm.weight", (D,), None),
    ("output_attn_res_proj.weight", (1, D), None),
    ("layers.0.input_layernorm.weight", (D,), None),
    ("layers.0.mlp_res_proj.weight", (1, D), None),
    ("layers.0.self_attn.q_proj.weight", (12288, D), "96 x [128, 7168]"),
    ("layers.0.self_attn.k_proj.weight", (12288, D), "96 x [128, 7168]"),
    ("layers.0.self_attn.v_proj.weight", (12288, D), "96 x [128, 7168]"),
    ("layers.0.self_attn.q_conv1d.weight", (12288, 1, 4), None),
    ("layers.0.self_attn.f_a_proj.weight", (128, D), "[128, 7168]"),
    ("layers.0.self_attn.f_b_proj.weight", (12288, 128), "[12288, 128]"),
    ("layers.0.self_attn.b_proj.weight", (96, D), None),
    ("layers.0.self_attn.g_proj.weight", (12288, D), "[12288, 7168]"),
    ("layers.0.self_attn.g_a_proj.weight", (128, D), "[128, 7168]"),
    ("layers.0.self_attn.g_b_proj.weight", (12288, 128), "[12288, 128]"),
    ("layers.0.self_attn.A_log", (96,), None),
    ("layers.0.self_attn.dt_bias", (12288,), None),
    ("layers.0.self_attn.o_norm.weight", (128,), None),
    ("layers.0.self_attn.o_proj.weight", (D, 12288), "[7168, 12288]"),
    ("layers.3.self_attn.q_a_proj.weight", (1536, D), "[1536, 7168]"),
    ("layers.3.self_attn.q_a_layernorm.weight", (1536,), None),
    (
        "layers.3.self_attn.q_b_proj.weight",
        (18432, 1536),
        "96 x [128, 1536] + 96 x [64, 1536]",
    ),
    ("layers.3.self_attn.q_proj.weight", (18432, D), "96 x [128, 7168] + 96 x [64, 7168]"),
    ("layers.3.self_attn.kv_a_proj_with_mqa.weight", (576, D), "[512, 7168] + [64, 7168]"),
    (
        "layers.3.self_attn.kv_b_proj.weight",
        (24576, 512),
        "96 x [128, 512] + 96 x [128, 512]",
    ),
    ("layers.3.self_attn.g_proj.weight", (12288, D), "[12288, 7168]"),
    ("layers.0.mlp.gate_proj.weight", (33792, D), "[33792, 7168]"),
    ("layers.3.block_sparse_moe.gate.weight", (896, D), "[896, 7168]"),
    (
        "layers.3.block_sparse_moe.experts.gate_up_proj",
        (896, 6144, 3584),
        "896 x [3072, 3584] + 896 x [3072, 3584]",
    ),
    ("layers.3.block_sparse_moe.experts.down_proj", (896, 3584, 3072), "896 x [3584, 3072]"),
    ("layers.3.block_sparse_moe.routed_expert_down_proj.weight", (3584, D), "[3584, 7168]"),
    ("layers.3.block_sparse_moe.routed_expert_norm.weight", (3584,), None),
    ("layers.3.block_sparse_moe.shared_experts.down_proj.weight", (D, 6144), "[7168, 6144]"),
    ("vision_tower.patch_embed.proj.weight", (1024, 3, 14, 14), None),
    ("vision_tower.encoder.blocks.0.wqkv.weight", (4608, 1024), None),
    ("vision_tower.encoder.final_layernorm.weight", (1024,), None),
    ("mm_projector.proj.0.weight", (4096, 4096), None),
    ("mtp_layers.0.eh_proj.weight", (D, 2 * D), "[7168, 7168] + [7168, 7168]"),
    ("mtp_layers.0.hnorm.weight", (D,), None),
    ("mtp_layers.0.shared_head.norm.weight", (D,), None),
    (
        "mtp_layers.0.self_attn.kv_b_proj.weight",
        (24576, 512),
        "96 x [128, 512] + 96 x [128, 512]",
    ),
]


def mixers_of(config: ModelConfig) -> dict[str, Mixer]:
    kda, mla = config.kda, config.mla
    heads: dict[str, Mixer] = {
        "kda": KdaHeads(num_heads=kda.num_heads, head_dim=kda.head_dim),
        "mla": MlaHeads(
            num_heads=mla.num_heads,
            kv_lora_rank=mla.kv_lora_rank,
            qk_nope_head_dim=mla.qk_nope_head_dim,
            qk_rope_head_dim=mla.qk_rope_head_dim,
            v_head_dim=mla.v_head_dim,
        ),
    }
    found = {f"layers.{i}.self_attn": heads[mixer] for i, mixer in enumerate(config.mixers)}
    found |= {f"mtp_layers.{i}.self_attn": heads["mla"] for i in range(config.num_mtp_layers)}
    return found


def rows_of(config: ModelConfig) -> dict[str, AssignmentRow]:
    with torch.device("meta"):
        parameters = list(Model(config).named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
    return {
        row.name: row for row in assign(parameters, k3_structure(shapes, mixers_of(config))).rows
    }


@pytest.mark.parametrize(("name", "shape", "matrices"), K3_TABLE)
def test_the_release_s_tensors_are_split_as_the_report_says(
    name: str, shape: tuple[int, ...], matrices: str | None
) -> None:
    record = k3_structure({name: shape}, MIXERS)[name]
    if matrices is None:
        assert isinstance(record, Elementwise)
    else:
        assert isinstance(record, MatrixBlocks) and record.describe(shape) == matrices


@pytest.mark.parametrize(
    "config",
    [tiny_k3(), tiny_k3(vision=VISION, num_mtp_layers=1), tiny_kimi_linear()],
    ids=["k3", "vision and mtp", "kimi linear"],
)
def test_every_parameter_of_a_model_has_a_place(config: ModelConfig) -> None:
    rows = rows_of(config)
    vectors = {name for name, row in rows.items() if row.group == "adamw"}
    assert all(name in vectors for name, row in rows.items() if min(row.shape) == 1)
    assert {row.group for row in rows.values()} == {"muon", "adamw"}


def test_only_the_decay_s_own_parameters_escape_weight_decay() -> None:
    free = {name.rsplit(".", 1)[1] for name, row in rows_of(tiny_k3()).items() if not row.use_decay}
    assert free == {"A_log", "dt_bias"}


def test_a_shared_key_of_width_zero_leaves_no_empty_matrix() -> None:
    mla = MlaHeads(
        num_heads=2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=0, v_head_dim=4
    )
    shapes = {
        "a.self_attn.kv_a_proj_with_mqa.weight": (8, 16),
        "a.self_attn.q_proj.weight": (8, 16),
    }
    found = k3_structure(shapes, {"a.self_attn": mla})
    described = [record.describe(shapes[name]) for name, record in found.items()]
    assert described == ["[8, 16]", "2 x [4, 16]"]


def test_without_heads_queries_keys_and_values_are_whole() -> None:
    shapes = {name: shape for name, shape, _ in K3_TABLE if "self_attn" in name}
    found = k3_structure(shapes, MIXERS, per_head=False)
    for name, matrices in {
        "layers.0.self_attn.q_proj.weight": "[12288, 7168]",
        "layers.3.self_attn.kv_b_proj.weight": "[24576, 512]",
        "layers.3.self_attn.kv_a_proj_with_mqa.weight": "[512, 7168] + [64, 7168]",
    }.items():
        assert found[name].describe(shapes[name]) == matrices


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("layers.0.mlp.w13.weight", (8, 4), r"w13\.weight \[8, 4\]: no rule"),
        ("layers.3.self_attn.wkv_b.weight", (8, 4), "no rule"),
        ("layers.0.self_attn.kv_b_proj.weight", (24576, 512), "no rule"),
        ("layers.5.self_attn.q_proj.weight", (12288, D), r"no entry 'layers\.5\.self_attn'"),
        ("layers.0.self_attn.q_proj.weight", (18432, D), r"does not end in \[12288, 7168\]"),
        ("layers.3.self_attn.kv_b_proj.weight", (24512, 512), r"does not end in \[24576, 512\]"),
        ("layers.3.block_sparse_moe.experts.gate_up_proj", (4, 7, 6), r"not end in \[6, 6\]"),
        ("layers.3.block_sparse_moe.gate.e_score_correction_bias", (896,), "no rule"),
    ],
)
def test_what_has_no_rule_or_another_shape_is_refused(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        k3_structure({name: shape}, MIXERS)


def one_row() -> AssignmentRow:
    matrix = MatrixBlocks(row_parts=(2,), col_parts=(3,), num_groups=2, why="rows by head")
    return assign([("q", torch.zeros(4, 3))], {"q": matrix}).rows[0]


def test_an_unassigned_parameter_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"w13 \[4, 3\]: unassigned"):
        assign([("w13", torch.zeros(4, 3))], {})


def test_a_record_without_a_parameter_is_an_error() -> None:
    norm = Elementwise(kind="norm", why="gain")
    with pytest.raises(ValueError, match=r"\['gone'\], which are no parameters"):
        assign([("norm", torch.zeros(4))], {"norm": norm, "gone": norm})


def test_a_vector_is_no_matrix_even_if_someone_says_so() -> None:
    record = MatrixBlocks(row_parts=(1,), col_parts=(8,), why="pseudo-query")
    with pytest.raises(ValueError, match=r"proj: \[1, 8\] has a single row or column"):
        assign([("proj", torch.zeros(1, 8))], {"proj": record})


def test_a_tensor_must_have_its_record_s_shape() -> None:
    record = MatrixBlocks(row_parts=(2,), col_parts=(8,), num_groups=3, why="")
    with pytest.raises(ValueError, match=r"q: \[8, 6\] does not end in \[6, 8\]"):
        assign([("q", torch.zeros(8, 6))], {"q": record})


def test_matrices_can_all_go_to_adamw() -> None:
    record = MatrixBlocks(row_parts=(2,), col_parts=(3,), why="")
    (row,) = assign([("q", torch.zeros(2, 3))], {"q": record}, matrices="adamw").rows
    assert row.group == "adamw" and row.blocks is None


def test_the_table_prints_one_line_per_parameter_and_the_totals() -> None:
    norm = Elementwise(kind="norm", use_decay=False, why="gain")
    rows = (one_row(), *assign([("norm", torch.zeros(5))], {"norm": norm}).rows)
    assert str(Assignment(rows=rows)).splitlines() == [
        "parameter  shape   group  matrices    decay  why",
        "q          [4, 3]  muon   2 x [2, 3]  yes    rows by head",
        "norm       [5]     adamw              no     norm: gain",
        "muon: 1 tensors, 12 parameters",
        "adamw: 1 tensors, 5 parameters",
    ]
