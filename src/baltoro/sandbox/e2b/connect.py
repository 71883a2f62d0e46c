"""The Connect protocol in its JSON form: what a call carries, how it ends, how errors travel.

A unary call is one JSON body each way, an error another HTTP status with `{"code", "message"}`. A
stream is envelopes (one byte of flags, four of length, JSON); the last has flag 2 and says how the
call ended. Compression is not spoken; the clients in use do not ask for it.
"""

import errno
import json
import re
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

from baltoro.sandbox.protocol import ImageError, LimitError, SandboxError

HEAD = struct.Struct(">BI")
END_FLAG = 2
UNARY_TYPE = "application/json"
STREAM_TYPE = "application/connect+json"
HTTP_STATUS = {
    "canceled": 499,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "unauthenticated": 401,
}
Message = dict[str, Any]


class RpcError(Exception):
    """How a call failed, in Connect's words."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def status(self) -> int:
        """The HTTP status of a unary call that ends so."""
        return HTTP_STATUS[self.code]

    def body(self) -> Message:
        """The error as JSON."""
        return {"code": self.code, "message": self.message}


def as_rpc_error(error: Exception) -> RpcError:
    """What a client hears of an error of a sandbox."""
    if isinstance(error, RpcError):
        return error
    message = str(error)
    if isinstance(error, LimitError):
        return RpcError("resource_exhausted", message)
    if isinstance(error, ImageError | ValueError):
        return RpcError("invalid_argument", message)
    if isinstance(error, SandboxError):
        return RpcError("unavailable", message)
    if isinstance(error, FileNotFoundError):
        return RpcError("not_found", message)
    if isinstance(error, FileExistsError):
        return RpcError("already_exists", message)
    if isinstance(error, PermissionError):
        return RpcError("permission_denied", message)
    if isinstance(error, OSError) and error.errno in (
        errno.EISDIR,
        errno.ENOTDIR,
        errno.EINVAL,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    ):
        return RpcError("invalid_argument", message)
    return RpcError("internal", message)


def envelope(message: Message, flags: int = 0) -> bytes:
    """One message of a stream."""
    data = json.dumps(message).encode()
    return HEAD.pack(flags, len(data)) + data


def end_of_stream(error: RpcError | None = None) -> bytes:
    """The last envelope of a stream."""
    return envelope({} if error is None else {"error": error.body()}, END_FLAG)


async def read_envelopes(
    pieces: AsyncIterator[bytes], max_message_bytes: int
) -> AsyncIterator[Message]:
    """The messages of a request's stream.

    `RpcError` if one is compressed, too long, no JSON object, or cut off.
    """
    buffer = bytearray()
    async for piece in pieces:
        buffer += piece
        while len(buffer) >= HEAD.size:
            flags, size = HEAD.unpack_from(buffer)
            if flags & 1:
                raise RpcError("unimplemented", "a message is compressed; send it as it is")
            if size > max_message_bytes:
                raise RpcError(
                    "resource_exhausted", f"a message is above {max_message_bytes} bytes"
                )
            if len(buffer) < HEAD.size + size:
                break
            data = bytes(buffer[HEAD.size : HEAD.size + size])
            del buffer[: HEAD.size + size]
            yield parse_message(data)
    if buffer:
        raise RpcError("invalid_argument", "the stream ends inside a message")


def parse_message(data: bytes) -> Message:
    """A JSON object. `RpcError` if it is none."""
    try:
        message = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise RpcError("invalid_argument", "the message is not JSON") from None
    if not isinstance(message, dict):
        raise RpcError("invalid_argument", "the message must be a JSON object")
    return message


def field(message: Message, name: str, kind: type, default: Any) -> Any:
    """A field of a message, by its JSON name. `RpcError` if it has another type."""
    value = message.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RpcError("invalid_argument", f"{name}={value!r}: must be {kind.__name__}")
    return value


def timeout_s(headers: Mapping[str, str]) -> float | None:
    """How long the client gives a call; None: for ever."""
    text = headers.get("connect-timeout-ms")
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,10}", text):
        raise RpcError("invalid_argument", f"connect-timeout-ms={text!r}: must be 1 to 10 digits")
    return max(int(text), 1) / 1e3
