from baltoro.serve.prefix import MediaSpan, extend_chain, num_common, root_hash


def chain(
    tokens: list[int], unit: int = 4, root: bytes = b"", media: tuple[MediaSpan, ...] = ()
) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, root or root_hash("1"), tokens, unit, media)
    return hashes


def test_only_complete_blocks_have_a_hash() -> None:
    assert [len(chain(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_covers_all_tokens_before_it() -> None:
    first, second = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert first[1] != second[1]


def test_a_chain_grows_as_it_would_have_been_made_at_once() -> None:
    grown = chain(list(range(6)))
    extend_chain(grown, root_hash("1"), list(range(13)), 4)
    assert grown == chain(list(range(13)))


def test_other_weights_and_other_salts_share_nothing() -> None:
    roots = [root_hash("1"), root_hash("2"), root_hash("1", "a"), root_hash("1a"), root_hash("")]
    assert len({chain(list(range(8)), root=root)[0] for root in roots}) == len(roots)


def test_pictures_with_equal_placeholders_differ_by_what_they_show() -> None:
    tokens = [1, 2, 60, 60, 60, 60, 60, 3, 4, 5, 6, 7]
    plain = chain(tokens)
    cat, dog = (chain(tokens, media=(MediaSpan(2, 7, digest),)) for digest in (b"cat", b"dog"))
    moved = chain(tokens, media=(MediaSpan(3, 7, b"cat"),))
    assert len({plain[0], cat[0], dog[0], moved[0]}) == 4
    later = chain(tokens, media=(MediaSpan(9, 10, b"cat"),))
    assert later[:2] == plain[:2] and later[2] != plain[2]


def test_chains_share_the_blocks_before_they_part() -> None:
    first, second = chain(list(range(40))), chain([*range(21), 0, *range(22, 40)])
    assert num_common(first, second) == 5
    assert num_common(first, first) == 10
    assert num_common(first, []) == 0
