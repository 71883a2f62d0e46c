"""`baltoro bench tune` without a GPU, by a timer of its own: what is refused, kept and written."""

import pytest
import torch
from ops.interpreted import assert_runs_interpreted, needs_interpreter

from baltoro import cli
from baltoro.ops import launch_table
from baltoro.ops.launch_table import forget, launch, read, section_of
from baltoro.ops.tune import tune, why_refused
from baltoro.ops.tune_case import Case
from baltoro.ops.tune_cases import KERNELS, cases

CPU = torch.device("cpu")
KERNEL, CLASS = "rms_norm_forward", "bf16 w128"
PINNED = {"rows": 64, "num_warps": 8}
INTERPRETED = """
import warnings

warnings.simplefilter("ignore")
import torch
from baltoro.ops import tune_cases, tune_layers
from baltoro.ops.launch_table import trying
from baltoro.ops.tune import why_refused

tune_cases.NORM_NUMBERS, tune_cases.CONV_TOKENS, tune_cases.LOSS_NUMBERS = 3000, 11, 2**16
tune_cases.UNIT_TOKENS = 2
tune_layers.PORTABLE_SIZE, tune_layers.MIX_TOKENS = (1, 70, 32), 2
cpu, fp32, sizes = torch.device("cpu"), torch.float32, (8, 2, 64, 64)
builds = []
for name in ("rms_norm", "short_conv", "cross_entropy", "situ_glu"):
    builds += tune_cases.cases((name,), cpu)[:2]
builds += [build for build in tune_layers.portable_cases(cpu) if fp32 in build.args][:5]
builds += [lambda n=n: tune_layers.decode_case(2, 64, 2, fp32, n, cpu) for n in (1, 3)]
builds += [lambda p=p: tune_layers.moe_case(sizes, p, 6, cpu) for p in (False, True)]
for build in builds:
    case = build()
    expected = [x.clone() for x in case.run()]
    for shape in case.candidates[::13]:
        with trying(case.kernel, case.shape_class, "portable", shape):
            assert why_refused(case.run, expected) is None, (case.kernel, shape)
"""


def case(results: dict[int, object], *rows: int) -> Case:
    """A call that gives `results` by the rows it is launched with."""

    def run() -> list[torch.Tensor]:
        found = results.get(launch(KERNEL, CLASS, CPU)["rows"], 1.0)
        if isinstance(found, Exception):
            raise found
        return [torch.full((4,), found)]

    candidates = [{"rows": number, "num_warps": 1} for number in rows]
    return Case(kernel=KERNEL, shape_class=CLASS, run=run, candidates=candidates)


def timer(times: dict[int, list[float]]):
    """Times by rows, one after another; the last one stays."""

    def measure(run) -> float:
        run()
        left = times[launch(KERNEL, CLASS, CPU)["rows"]]
        return left.pop(0) if len(left) > 1 else left[0]

    return measure


def tuned(tmp_path, given: Case, times: dict[int, list[float]], budget: float = 9.0, **options):
    assert launch(KERNEL, CLASS, CPU) == PINNED, "what the tests begin with"
    out = tmp_path / "table.json"
    found = tune([lambda: given], CPU, out, budget, timer(times), **options)
    return found, out


def test_the_fastest_candidate_is_written_and_the_rest_of_the_table_stays(tmp_path, capsys):
    found, out = tuned(tmp_path, case({}, 1, 2, 4), {64: [1.0], 1: [0.9], 2: [0.7], 4: [0.8]})
    before, after = launch_table.pinned(), read(out)
    assert after["portable"][KERNEL].pop(CLASS) == {"rows": 2, "num_warps": 1} == found[0].new
    assert after["portable"][KERNEL] == {
        name: shape for name, shape in before["portable"][KERNEL].items() if name != CLASS
    }
    assert after["portable"].keys() == before["portable"].keys()
    line = capsys.readouterr().out
    assert "[1/1, 0 s left]" in line and "rows=64" in line and "(0.700)" in line


@pytest.mark.parametrize("new_ms", [0.97, 0.975, 1.0, 1.2])
def test_a_tie_keeps_the_pinned_shape(tmp_path, new_ms):
    found, out = tuned(tmp_path, case({}, 1), {64: [1.0], 1: [new_ms]})
    assert found[0].new == PINNED and not out.exists()


def test_a_win_that_does_not_come_twice_keeps_the_pinned_shape(tmp_path):
    found, out = tuned(tmp_path, case({}, 1), {64: [1.0, 0.8], 1: [0.78, 0.79]})
    assert found[0].new == PINNED and not out.exists()


@pytest.mark.parametrize("result", [1.1, float("nan"), RuntimeError("out of shared memory")])
def test_a_candidate_that_fails_or_gives_something_else_is_never_timed(tmp_path, result):
    found, _ = tuned(tmp_path, case({1: result}, 1, 2), {64: [1.0], 2: [0.5]})
    assert found[0].new["rows"] == 2 and len(found[0].refused) == 1
    assert "rows=1" in found[0].refused[0]


def test_what_the_budget_leaves_out_keeps_its_shape_and_is_named(tmp_path, capsys):
    seconds = iter((0.0, 10.0))  # at the start, and before the first case
    found, out = tuned(tmp_path, case({}, 1), {}, clock=lambda: next(seconds))
    assert not found and not out.exists()
    assert "1 cases keep their shapes" in capsys.readouterr().out


def test_candidates_after_the_budget_are_not_tried(tmp_path):
    seconds = iter((0.0, 1.0, 2.0, 10.0, 10.0, 10.0))
    given = case({}, 1, 2, 4)
    found, _ = tuned(tmp_path, given, {64: [1.0], 1: [0.5]}, clock=lambda: next(seconds))
    assert found[0].new["rows"] == 1


def test_the_table_in_use_is_as_before(tmp_path):
    tuned(tmp_path, case({}, 1), {64: [1.0], 1: [0.5]})
    assert launch(KERNEL, CLASS, CPU) == PINNED


@pytest.mark.slow
@needs_interpreter
def test_candidates_give_what_the_pinned_shape_gives_in_the_interpreter():
    pytest.importorskip("triton", reason="triton is not installed")
    assert_runs_interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_a_case_launches_by_its_own_entry_and_repeats(name, monkeypatch):
    device = torch.device("cuda", 0)
    look_up, asked = launch_table._launch, []

    def noted(*key: str):
        asked.append(key)
        return look_up(*key)

    monkeypatch.setattr(launch_table, "_launch", noted)
    for build in cases((name,), device):
        case = build()
        forget()
        asked.clear()
        first = [x.clone() for x in case.run()]
        assert (case.kernel, case.shape_class, section_of(device)) in asked
        assert why_refused(case.run, first) is None and case.candidates


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_verb_says_in_a_line_that_it_needs_a_gpu(capsys):
    assert cli.main(["bench", "tune"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "needs an NVIDIA GPU" in said.err and not said.out


def test_the_verbs_help_names_its_kernels_and_rules(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "tune", "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for word in ("--only", "--out", "--budget", "rms_norm", "short_conv", "candidate"):
        assert word in said


def test_the_verb_lists_what_is_pinned(capsys):
    assert cli.main(["bench", "list"]) == 0
    assert f"portable  {KERNEL}  {CLASS}  rows=64 num_warps=8\n" in capsys.readouterr().out
