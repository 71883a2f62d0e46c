"""Work that a layer hands to its fork: the same numbers whenever it is done."""

from collections.abc import Callable

import pytest
import torch
from model.tiny import tiny_k3, tiny_kimi_linear

from baltoro.model.beside import T, at_once
from baltoro.model.config import ModelConfig
from baltoro.model.model import Model
from baltoro.model.moe import Moe


class Late:
    """A fork that does its work when asked for the result, and notes both."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __call__(self, run: Callable[[], T], /) -> Callable[[], T]:
        self.events.append("begun")

        def result() -> T:
            self.events.append("asked")
            return run()

        return result


def test_the_default_does_the_work_before_anything_else() -> None:
    done = []
    result = at_once(lambda: done.append(1) or 7)
    assert done == [1]
    assert result() == 7 and result() == 7 and done == [1]


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("config", [tiny_k3(), tiny_kimi_linear()], ids=["k3", "kimi-linear"])
def test_a_layer_asks_late_for_what_it_handed_over(config: ModelConfig, is_joined: bool) -> None:
    torch.manual_seed(0)
    model = Model(config).eval().double()
    tokens, bounds = torch.arange(14), torch.tensor([0, 9, 14], dtype=torch.int32)
    with torch.no_grad():
        expected = model(tokens, bounds).hidden
        if is_joined:
            model.join_projections()
        late = Late()
        layers = [module for module in model.modules() if isinstance(module, Moe)]
        for layer in layers:
            layer.fork = late
        torch.testing.assert_close(model(tokens, bounds).hidden, expected)
    # router and shared experts both begin before either is waited for
    assert late.events == ["begun", "begun", "asked", "asked"] * len(layers)
