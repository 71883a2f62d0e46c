"""Whole files in and out over plain HTTP, as envd's `/files` has it."""

import base64
import hashlib
import hmac
import posixpath
import time
import zlib
from collections.abc import Mapping

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import UploadFile

from baltoro.sandbox.e2b import files
from baltoro.sandbox.e2b.connect import RpcError, as_rpc_error
from baltoro.sandbox.e2b.session import Session
from baltoro.sandbox.protocol import SandboxError

STATUS = {"not_found": 404, "invalid_argument": 400, "resource_exhausted": 507, "unavailable": 502}


def failed(error: Exception) -> Response:
    """What a client hears of a transfer that failed."""
    failure = as_rpc_error(error)
    status = STATUS.get(failure.code, failure.status)
    return JSONResponse({"code": status, "message": failure.message}, status)


async def download(session: Session, request: Request, max_bytes: int) -> Response:
    """GET: a file's bytes."""
    try:
        path = files.inside(_path(request), session.home.path)
        async with session.awake() as sandbox:
            data = await sandbox.read(path, max_bytes)
    except (RpcError, SandboxError, OSError, ValueError) as error:
        return failed(error)
    return Response(data, media_type="application/octet-stream")


async def upload(session: Session, request: Request, max_bytes: int) -> Response:
    """POST: files to write, as a form or as the body itself."""
    try:
        if any(name.startswith("x-metadata-") for name in request.headers):
            raise RpcError("invalid_argument", "x-metadata-*: file metadata is not kept")
        kind = request.headers.get("content-type", "").partition(";")[0]
        if kind == "multipart/form-data":
            contents = await _form(request, max_bytes)
        else:
            contents = [(_path(request), await read_body(request, max_bytes))]
        written = []
        async with session.awake() as sandbox:
            for name, data in contents:
                path = files.inside(name, session.home.path)
                await sandbox.write(path, data)
                written.append({"name": posixpath.basename(path), "type": "file", "path": path})
    except (RpcError, SandboxError, OSError, ValueError) as error:
        return failed(error)
    return JSONResponse(written)


def is_signed(query: Mapping[str, str], operation: str, token: str) -> bool:
    """Whether a link to a file carries the signature of the sandbox's token, and is not over."""
    expiration = query.get("signature_expiration")
    words = [query.get("path", ""), operation, query.get("username", ""), token]
    if expiration is not None:
        if not expiration.isdigit() or time.time() > int(expiration):
            return False
        words.append(expiration)
    digest = hashlib.sha256(":".join(words).encode()).digest()
    expected = "v1_" + base64.b64encode(digest).decode().rstrip("=")
    return hmac.compare_digest(query.get("signature", "").encode(), expected.encode())


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, unpacked if it is gzip. `RpcError` above `max_bytes`."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding not in ("identity", "gzip"):
        raise RpcError("invalid_argument", f"content-encoding={encoding!r}: must be gzip or none")
    unpack = zlib.decompressobj(wbits=31) if encoding == "gzip" else None
    data = bytearray()
    async for piece in request.stream():
        try:
            data += unpack.decompress(piece, max_bytes + 1) if unpack else piece
        except zlib.error as error:
            raise RpcError("invalid_argument", f"the body is not gzip: {error}") from None
        if len(data) > max_bytes or (unpack and unpack.unconsumed_tail):
            raise RpcError("resource_exhausted", f"the body is above {max_bytes} bytes")
    if unpack and not unpack.eof:
        raise RpcError("invalid_argument", "the body is cut off")
    return bytes(data)


async def _form(request: Request, max_bytes: int) -> list[tuple[str, bytes]]:
    """Names and contents; with one file, `path` of the query is its name."""
    length = request.headers.get("content-length")
    if length is None:
        raise RpcError("invalid_argument", "content-length: a form needs it; or send the body")
    if int(length) > max_bytes:
        raise RpcError("resource_exhausted", f"the body is above {max_bytes} bytes")
    async with request.form(max_files=1000) as form:
        parts = [part for _, part in form.multi_items() if isinstance(part, UploadFile)]
        named = [(part.filename or "", await part.read()) for part in parts]
    if request.query_params.get("path") and len(named) == 1:
        named = [(_path(request), named[0][1])]
    if not named or not all(name for name, _ in named):
        raise RpcError("invalid_argument", "file: the form needs files with names")
    return named


def _path(request: Request) -> str:
    path = request.query_params.get("path")
    if not path:
        raise RpcError("invalid_argument", "path: is missing")
    return path
