import pytest

from baltoro.serve.tier import Checkpoint, Tier, cover


def checkpoint(tier: Tier, name: str, kv_pages: list[int], bonus: float = 0.0) -> Checkpoint:
    """A checkpoint with one state page over latent pages that are found under `name` and number."""
    keys = [f"{name}{number}".encode() for number in range(len(kv_pages))]
    for key, page in zip(keys, kv_pages, strict=True):
        tier.register(key, page)
    made = Checkpoint(
        key=name.encode(),
        position=len(kv_pages),
        state_pages=(tier.take(),),
        kv_pages=tuple(kv_pages),
        kv_keys=tuple(keys),
        bonus=bonus,
    )
    tier.add(made, 0.0)
    for page in made.pages:
        tier.release(page, 0.0)
    return made


def test_a_page_without_hashes_is_free_again_and_one_with_hashes_stays_cached() -> None:
    tier = Tier(3)
    plain, named = tier.take(), tier.take()
    tier.register(b"k", named)
    tier.release(plain, 0.0)
    tier.release(named, 0.0)
    assert (tier.num_free, tier.num_available) == (2, 3)
    assert tier.victim() == named
    tier.drop(named)
    assert tier.num_free == 3 and not tier.index
    tier.audit([])


def test_a_checkpoint_goes_in_all_groups_at_once_and_frees_its_latents() -> None:
    tier = Tier(4)
    made = checkpoint(tier, "a", [tier.take(), tier.take()])
    assert tier.victim() is made
    tier.drop(made)
    assert not made.is_alive and not tier.checkpoints
    assert tier.num_free == 2  # its state page; the latents are cached, without anyone's wish
    tier.audit([])


def test_latents_under_a_checkpoint_are_never_dropped_before_it() -> None:
    tier = Tier(3)
    made = checkpoint(tier, "a", [tier.take(), tier.take()], bonus=100.0)
    assert tier.victim() is made


def test_what_is_read_is_not_dropped() -> None:
    tier = Tier(4)
    first, second = checkpoint(tier, "a", [tier.take()]), checkpoint(tier, "b", [tier.take()])
    tier.pin(first)
    assert tier.num_available == 2
    assert tier.victim() is second
    tier.unpin(first, 1.0)
    assert tier.victim() is first


def test_a_use_and_a_higher_worth_put_off_the_removal() -> None:
    tier = Tier(6)
    worth = checkpoint(tier, "a", [tier.take()], bonus=5.0)
    used = checkpoint(tier, "b", [tier.take()])
    idle = checkpoint(tier, "c", [tier.take()])
    tier.touch(used, 3.0)
    order = []
    for _ in range(3):
        victim = tier.victim()
        while not isinstance(victim, Checkpoint):
            tier.drop(victim)
            victim = tier.victim()
        tier.drop(victim)
        order.append(victim)
    assert order == [idle, used, worth]


def test_many_uses_do_not_fill_the_memory() -> None:
    tier = Tier(2)
    made = checkpoint(tier, "a", [tier.take()])
    for clock in range(10_000):
        tier.touch(made, float(clock // 100))
    assert len(tier._heap) <= 4 * 2 + 64


def test_whole_pages_come_first_and_then_the_longest_boundary_of_the_next() -> None:
    tier = Tier(4)
    first, second = tier.take(), tier.take()
    keys = [bytes([i]) for i in range(6)]  # three blocks in a page
    for key in keys[:3]:
        tier.register(key, first)
    tier.register(keys[4], second)
    found = cover(keys, 3, [tier])
    assert [(page, units) for _, page, units in found] == [(first, 3), (second, 2)]
    assert cover(keys[:4], 3, [tier])[-1].page == first
    assert cover([b"x", b"y", b"z", *keys[3:]], 3, [tier]) == []


def test_the_account_notices_a_hold_that_nobody_knows_of() -> None:
    tier = Tier(2)
    tier.take()
    with pytest.raises(AssertionError, match="page 1"):
        tier.audit([])
