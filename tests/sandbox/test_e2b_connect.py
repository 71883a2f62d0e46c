"""Connect's JSON form: envelopes, their limits, and which error a client hears of."""

import asyncio

import pytest

from baltoro.sandbox.e2b.connect import (
    HEAD,
    RpcError,
    as_rpc_error,
    end_of_stream,
    envelope,
    field,
    parse_message,
    read_envelopes,
    timeout_s,
)
from baltoro.sandbox.protocol import ImageError, LimitError, SandboxError


def read(*pieces, max_message_bytes=100):
    async def stream():
        for piece in pieces:
            yield piece

    async def collect():
        return [message async for message in read_envelopes(stream(), max_message_bytes)]

    return asyncio.run(collect())


def test_messages_come_out_whole_however_the_stream_is_cut():
    data = envelope({"a": 1}) + envelope({}) + envelope({"b": "x"})
    for size in (1, 3, 7, len(data)):
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        assert read(*pieces) == [{"a": 1}, {}, {"b": "x"}]


def test_a_stream_that_breaks_the_rules_is_refused_by_name():
    with pytest.raises(RpcError, match="ends inside"):
        read(envelope({"a": 1})[:-1])
    with pytest.raises(RpcError, match="compressed"):
        read(envelope({"a": 1}, flags=1))
    with pytest.raises(RpcError, match="above 100 bytes"):
        read(HEAD.pack(0, 101))  # before the bytes are here
    with pytest.raises(RpcError, match="not JSON"):
        read(HEAD.pack(0, 1) + b"{")
    with pytest.raises(RpcError, match="JSON object"):
        parse_message(b"[1]")


def test_the_last_envelope_says_how_the_call_ended():
    assert end_of_stream() == b"\x02\x00\x00\x00\x02{}"
    flags, size = HEAD.unpack_from(end_of_stream(RpcError("not_found", "x")))
    assert (flags, size) == (2, len(b'{"error": {"code": "not_found", "message": "x"}}'))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LimitError("x"), "resource_exhausted"),
        (ImageError("x"), "invalid_argument"),
        (SandboxError("x"), "unavailable"),
        (FileNotFoundError(2, "x"), "not_found"),
        (FileExistsError(17, "x"), "already_exists"),
        (PermissionError(13, "x"), "permission_denied"),
        (IsADirectoryError(21, "x"), "invalid_argument"),
        (OSError(5, "x"), "internal"),
        (ValueError("x"), "invalid_argument"),
    ],
)
def test_an_error_has_one_code(error, code):
    assert as_rpc_error(error).code == code
    assert as_rpc_error(error).status >= 400


def test_a_time_limit_is_digits_of_milliseconds():
    assert timeout_s({}) is None
    assert timeout_s({"connect-timeout-ms": "1500"}) == 1.5
    for text in ("-1", "1.5", "", "12345678901"):
        with pytest.raises(RpcError, match="connect-timeout-ms"):
            timeout_s({"connect-timeout-ms": text})


def test_a_field_of_another_type_is_named():
    assert field({"depth": None}, "depth", int, 7) == 7
    for value in ("3", True, [1]):
        with pytest.raises(RpcError, match="depth="):
            field({"depth": value}, "depth", int, 0)
