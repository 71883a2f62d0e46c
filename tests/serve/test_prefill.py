"""Prompts in packs of fixed rows, against separate eager calls."""

import pytest
from serve.test_runner import LINEAR, TINY, alone, engine, ids, request, written

from baltoro.model.model import Model
from baltoro.serve import prefill


@pytest.mark.parametrize("model", [TINY, LINEAR], ids=["k3", "kimi-linear"])
def test_prompts_in_fixed_rows_are_read_as_by_separate_calls(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "LONG", 128)
    monkeypatch.setattr(prefill, "FEW_SEQUENCES", 2)
    served = engine("resident", model, max_step_tokens=200)
    packs = served.runner.packs
    assert packs is not None and packs.sizes == (64, 128)
    sizes = []
    run = packs.run

    def watched(spans, tokens_of):  # type: ignore[no-untyped-def]
        sizes.append((packs.size_of(spans), [span.cut is not None for span in spans]))
        return run(spans, tokens_of)

    packs.run = watched  # type: ignore[method-assign]
    prefix = ids(40, 9)
    wanted = [request(prefix + ids(count, count), 3) for count in (30, 13, 14, 90)]
    wanted += [request(ids(count, count), 3) for count in (1, 70, 5)]
    for group in (wanted[:1], wanted[1:3], wanted[3:], wanted):
        for sequence, one in zip(served.generate(group), group, strict=True):
            expected = alone(model, one)
            assert written(sequence) == written(expected)
            for token, other in zip(sequence.new_tokens, expected.new_tokens, strict=True):
                assert token.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert served.stats.cached_tokens > 0
    assert len({size for size, _ in sizes}) > 1
    assert any(all(cuts) for _, cuts in sizes) and any(not all(cuts) for _, cuts in sizes)
    assert {len(cuts) for size, cuts in sizes if size == 64} == {1, 2}
    assert any(len(cuts) > 2 for size, cuts in sizes if size == 128)
