"""Launches past Triton's look at every argument, and operators past torch's dispatcher."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl
from ops.earned import Allocations
from ops.harness import poisoned_memory
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from baltoro.ops.triton import (
    allocator,
    as_operator,
    enqueue,
    record,
    unfilled_like,
)


class Compiled:
    """What Triton's first launch returns: it keeps what it is launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.launches = []

    def run(self, x, y, z, stream, function, metadata, before, enter, leave, *arguments):
        assert (stream, function, metadata) == ("stream", self.function, self.packed_metadata)
        assert before is enter is leave is None
        self.launches.append(((x, y, z), arguments))


class Kernel(JITFunction):
    """A kernel of three arguments and two compile-time ones that counts Triton's own launches."""

    def __init__(self):
        self.fn = object()
        self.arg_names = ["x", "n", "rest", "B", "A"]
        self.compiled = []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return launch


@pytest.fixture
def kernel(monkeypatch):
    set_device(monkeypatch, -1)  # that of a tensor on the CPU
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: "stream", raising=False)
    return Kernel()


def set_device(monkeypatch, index):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: index, raising=False)


def call(kernel, x, n=5, rest=None, block=8, num_warps=1):
    enqueue(kernel, (3,), x, n, rest, A=1.5, B=block, num_warps=num_warps)


def test_a_second_launch_goes_to_the_kept_kernel_with_addresses_and_constants_in_its_order(kernel):
    x, y = torch.zeros(64), torch.zeros(64)
    call(kernel, x)
    call(kernel, y, n=7)
    assert len(kernel.compiled) == 1
    assert kernel.compiled[0].launches == [((3, 1, 1), (y.data_ptr(), 7, None, 8, 1.5))]


@pytest.mark.parametrize("place", [0, 2])
def test_tensors_of_another_device_are_left_to_triton(kernel, monkeypatch, place):
    x = torch.zeros(64)
    call(kernel, x, rest=(x, x))
    set_device(monkeypatch, 0)
    arguments = [5, 5, 5]
    arguments[place] = x if place == 0 else (x, x)
    for _ in range(2):
        enqueue(kernel, (3,), *arguments, A=1.5, B=8, num_warps=1)
    assert len(kernel.compiled) == 3 and not kernel.compiled[0].launches


def test_tuples_of_tensors_go_as_tuples_of_addresses(kernel):
    rows = tuple(torch.zeros(64) for _ in range(3))
    for _ in range(2):
        call(kernel, rows[0], rest=rows)
    assert kernel.compiled[0].launches[0][1][2] == tuple(row.data_ptr() for row in rows)


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(64, dtype=torch.bfloat16)},
        {"n": 1},
        {"n": 16},
        {"n": 2**31},
        {"n": 5.0},
        {"rest": torch.zeros(4)},
        {"rest": (torch.zeros(4),)},
        {"block": 16},
        {"num_warps": 2},
    ],
)
def test_what_triton_compiles_apart_is_kept_apart(kernel, other):
    x = torch.zeros(64)
    for _ in range(2):
        call(kernel, x)
        call(kernel, **{"x": x, **other})
    assert len(kernel.compiled) == 2
    assert [len(compiled.launches) for compiled in kernel.compiled] == [1, 1]


def test_tuples_of_other_lengths_and_dtypes_are_kept_apart(kernel):
    x = torch.zeros(64)
    for _ in range(2):
        for rest in ((x,), (x, x), (x.bfloat16(),)):
            call(kernel, x, rest=rest)
    assert [len(compiled.launches) for compiled in kernel.compiled] == [1, 1, 1]


@pytest.mark.parametrize("is_in_tuple", [False, True])
def test_an_address_that_is_not_aligned_is_shown_to_triton_every_time(kernel, is_in_tuple):
    x, odd = torch.zeros(64), torch.zeros(64)[1:]
    call(kernel, x, rest=(x,) if is_in_tuple else None)
    for _ in range(2):
        call(kernel, x if is_in_tuple else odd, rest=(odd,) if is_in_tuple else None)
    assert len(kernel.compiled) == 3
    assert not kernel.compiled[0].launches


def test_a_profiler_that_listens_to_launches_hears_them(kernel, monkeypatch):
    x = torch.zeros(64)
    call(kernel, x)
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    call(kernel, x)
    assert len(kernel.compiled) == 2
    assert not kernel.compiled[0].launches


def _doubled(x: Tensor) -> Tensor:
    return x.new_empty(x.shape).copy_(x + x)


_double = as_operator("test_double", _doubled, torch.empty_like)


def test_an_operator_is_called_directly_but_seen_by_those_who_watch_and_trace():
    x = torch.ones(3)
    assert torch.equal(_double(x), x + x)
    with Allocations() as seen:
        _double(x)
    assert len(seen.shapes) == 1  # what it does inside is not seen
    compiled = torch.compile(lambda x: _double(x) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), x + x + 1)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**3

    @staticmethod
    def backward(ctx, d_out):
        return 3 * ctx.factor * ctx.saved_tensors[0] ** 2 * d_out, None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_a_recorded_function_is_differentiated_and_traced():
    x = torch.arange(3.0).requires_grad_()

    def cube(x: Tensor) -> Tensor:
        return record(Cube, x, 2.0)

    for run in (cube, torch.compile(cube, backend="aot_eager", fullgraph=True)):
        y = run(x)
        assert torch.equal(y, 2 * x**3)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 6 * x**2)


def test_a_recorded_function_that_knows_no_transform_is_refused_under_one():
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: record(Cube, x, 2.0))(torch.tensor(1.0))


def assert_fresh(x: Tensor, like: Tensor) -> None:
    """Contiguous, of the shape, dtype and device of `like`, and NaN where torch fills memory."""
    assert (x.shape, x.dtype, x.device) == (like.shape, like.dtype, like.device)
    assert x.is_contiguous() and not x.requires_grad
    if torch.are_deterministic_algorithms_enabled():
        assert x.isnan().all()


def likes(device: str) -> list[Tensor]:
    """Of all kinds: contiguous or not, empty, of one and of three dims, parameters."""
    x = torch.zeros(4, 6, device=device, dtype=torch.bfloat16)
    return [x, x.T, x[:, ::2], x[:0], x[:, :0], x[0], x.view(2, 2, 6).mT, torch.nn.Parameter(x)]


def test_unfilled_memory_is_contiguous_and_filled_where_torch_fills_it():
    for like in likes("cpu"):
        assert_fresh(unfilled_like(like), like)
        with poisoned_memory():
            assert_fresh(unfilled_like(like), like)


@pytest.mark.gpu
def test_unfilled_memory_of_a_device_is_contiguous_and_filled_where_torch_fills_it():
    for index in range(torch.cuda.device_count()):
        for like in likes(f"cuda:{index}"):
            assert_fresh(unfilled_like(like), like)
            with poisoned_memory():
                assert_fresh(unfilled_like(like), like)


@pytest.mark.gpu
def test_memory_goes_past_the_dispatcher_only_for_plain_tensors_of_the_current_device():
    quick = torch._C._dynamo.guards._empty_strided_cuda
    x = torch.zeros(3, device="cuda")
    assert allocator(x) is quick
    assert allocator(torch.nn.Parameter(x)) is not quick
    for index in range(1, torch.cuda.device_count()):
        assert allocator(x.to(f"cuda:{index}")) is not quick
    with poisoned_memory():
        assert allocator(x) is not quick


@triton.jit
def _scale_kernel(x, y, n, factor, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)


@pytest.mark.gpu
def test_kept_launches_give_what_tritons_own_do():
    for n in (1, 16, 100, 2**20 + 3, 16, 1, 100):
        for start in (0, 1, 16):
            x = torch.randn(n + start, device="cuda")[start:]
            y = torch.empty_like(x)
            enqueue(_scale_kernel, (-(-n // 64),), x, y, n, 3.0, B=64)
            assert torch.equal(y, 3.0 * x)
