"""The HTTP server that E2B's clients plug into, over any driver of ours.

    here = {"api_url": "http://127.0.0.1:3000", "sandbox_url": "http://127.0.0.1:3000"}
    e2b.Sandbox.create(api_key="any", **here)

What it guards: keys of the control plane, a token per sandbox for the calls into it, sizes of
bodies and files, what a client may see of an error. What it does not: TLS, rates per client, who
may read `/metrics`; put a proxy in front. It listens on the loopback unless told otherwise.
"""

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from baltoro.sandbox.e2b import envd, transfer
from baltoro.sandbox.e2b.connect import RpcError, as_rpc_error
from baltoro.sandbox.e2b.control import ApiError, Control, ControlConfig, Json
from baltoro.sandbox.e2b.records import Records
from baltoro.sandbox.e2b.session import Home, NotRunningError, Session
from baltoro.sandbox.keeper import Keeper, KeeperPolicy
from baltoro.sandbox.machine import MachineDriver
from baltoro.sandbox.process import ProcessDriver
from baltoro.sandbox.protocol import Driver, LimitError, Limits, SandboxError
from baltoro.sandbox.selftest import machine_drivers
from baltoro.sandbox.store import Store

log = logging.getLogger(__name__)
REAP_INTERVAL_S = 1.0
MAX_BODY_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """What the server adds to the control plane."""

    api_keys: tuple[str, ...] = ()  # empty: anybody
    max_file_bytes: int = 256 << 20


def create_app(control: Control, config: ServerConfig) -> FastAPI:
    """The routes."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await control.adopt()
        reaper = asyncio.create_task(_reap(control))
        try:
            yield
        finally:
            reaper.cancel()
            await asyncio.gather(reaper, return_exceptions=True)
            await control.close()

    app = FastAPI(title="baltoro sandboxes", lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_errors(app)
    _add_control(app, control, config)
    _add_envd(app, control, config)
    return app


def _add_errors(app: FastAPI) -> None:
    async def on_error(_: Request, error: Exception) -> Response:
        if isinstance(error, ApiError):
            status, message = error.status, error.message
        elif isinstance(error, HTTPException):
            status, message = error.status_code, str(error.detail)
        elif isinstance(error, NotRunningError):
            return envd.not_running(error)
        elif isinstance(error, LimitError):
            status, message = 429, str(error)
        elif isinstance(error, ValueError):
            status, message = 400, str(error)
        elif isinstance(error, SandboxError | RpcError):
            failure = as_rpc_error(error)
            status, message = failure.status, failure.message
        else:
            log.error("a request failed", exc_info=error)
            status, message = 500, "internal error"
        return JSONResponse({"code": status, "message": message}, status)

    for kind in (ApiError, HTTPException, SandboxError, RpcError, ValueError, Exception):
        app.add_exception_handler(kind, on_error)


def _add_control(app: FastAPI, control: Control, config: ServerConfig) -> None:
    async def check_key(request: Request) -> None:
        offered = request.headers.get("x-api-key", "").encode()
        known = [hmac.compare_digest(offered, key.encode()) for key in config.api_keys]
        if config.api_keys and not any(known):
            raise ApiError(401, "the API key is missing or wrong")

    keyed = APIRouter(dependencies=[Depends(check_key)])

    @keyed.post("/sandboxes", status_code=201)
    @keyed.post("/v2/sandboxes", status_code=201)
    async def create(request: Request) -> Json:
        return await control.create(await _json(request), request.headers.get("idempotency-key"))

    @keyed.get("/sandboxes")
    @keyed.get("/v2/sandboxes")
    async def list_sandboxes(request: Request) -> Response:
        page, token = control.page(request.query_params)
        return JSONResponse(page, headers={} if token is None else {"x-next-token": token})

    @keyed.get("/sandboxes/{sandbox_id}")
    async def detail(sandbox_id: str) -> Json:
        return control.detail(sandbox_id)

    @keyed.delete("/sandboxes/{sandbox_id}", status_code=204)
    async def kill(sandbox_id: str) -> None:
        await control.kill(sandbox_id)

    @keyed.post("/sandboxes/{sandbox_id}/pause", status_code=204)
    async def pause(sandbox_id: str, request: Request) -> None:
        await control.pause(sandbox_id, await _json(request))

    @keyed.post("/sandboxes/{sandbox_id}/resume")
    @keyed.post("/sandboxes/{sandbox_id}/connect")
    @keyed.post("/v2/sandboxes/{sandbox_id}/connect")
    async def connect(sandbox_id: str, request: Request) -> Response:
        body, was_paused = await control.connect(sandbox_id, await _json(request))
        return JSONResponse(body, 201 if was_paused else 200)

    @keyed.post("/sandboxes/{sandbox_id}/timeout", status_code=204)
    async def timeout(sandbox_id: str, request: Request) -> None:
        control.set_timeout(sandbox_id, await _json(request))

    @keyed.post("/sandboxes/{sandbox_id}/refreshes", status_code=204)
    async def refresh(sandbox_id: str, request: Request) -> None:
        control.set_timeout(sandbox_id, await _json(request), is_refresh=True)

    @keyed.post("/sandboxes/{sandbox_id}/fork", status_code=201)
    async def fork(sandbox_id: str, request: Request) -> list[Json]:
        return await control.fork(sandbox_id, await _json(request))

    @keyed.post("/sandboxes/{sandbox_id}/snapshots", status_code=201)
    async def snapshot(sandbox_id: str, request: Request) -> Json:
        return await control.snapshot(sandbox_id, await _json(request))

    @keyed.get("/snapshots")
    async def snapshots() -> list[Json]:
        return control.snapshots()

    @keyed.delete("/templates/{snapshot_id}", status_code=204)
    async def delete_snapshot(snapshot_id: str) -> None:
        control.delete_snapshot(snapshot_id)

    @keyed.get("/sandboxes/{sandbox_id}/metrics")
    async def sandbox_metrics(sandbox_id: str) -> list[Json]:
        return control.metrics(sandbox_id)

    app.include_router(keyed)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(control.keeper.metrics())


def _add_envd(app: FastAPI, control: Control, config: ServerConfig) -> None:
    def session_of(request: Request, operation: str | None = None) -> Session:
        """The sandbox that a call is for. With `operation` a signed link will do for a token."""
        sandbox_id = _sandbox_id(request)
        session = control.session(sandbox_id)
        if session is None:
            raise NotRunningError(sandbox_id, "gone")
        token = session.record.token
        given = request.headers.get("x-access-token", "")
        is_known = hmac.compare_digest(given.encode(), token.encode())
        is_signed = operation and transfer.is_signed(request.query_params, operation, token)
        if not is_known and not is_signed:
            raise ApiError(401, "x-access-token: missing or wrong")
        envd.check_user(request.headers)
        return session

    @app.get("/health", status_code=204)
    async def health(request: Request) -> Response:
        if "e2b-sandbox-id" in request.headers:
            session_of(request).check_running()
        return Response(status_code=204)

    @app.get("/files")
    async def download(request: Request) -> Response:
        session = session_of(request, "read")
        return await transfer.download(session, request, config.max_file_bytes)

    @app.post("/files")
    async def upload(request: Request) -> Response:
        session = session_of(request, "write")
        return await transfer.upload(session, request, config.max_file_bytes)

    @app.post("/{service}/{method}")
    async def call(service: str, method: str, request: Request) -> Response:
        return await envd.call(session_of(request), f"{service}/{method}", request)


def _sandbox_id(request: Request) -> str:
    """From the header that clients send, or from a host name like `49983-ID.domain`."""
    port, sandbox_id = request.headers.get("e2b-sandbox-port", "49983"), ""
    if "e2b-sandbox-id" in request.headers:
        sandbox_id = request.headers["e2b-sandbox-id"]
    else:
        port, _, sandbox_id = request.headers.get("host", "").partition(".")[0].partition("-")
    if port != "49983":
        raise ApiError(502, f"port {port}: port is not open; sandboxes serve nobody outside")
    return sandbox_id


async def _json(request: Request) -> Json:
    body = await transfer.read_body(request, MAX_BODY_BYTES)
    try:
        data = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object")
    return data


async def _reap(control: Control) -> None:
    while True:
        try:
            await control.reap()
        except SandboxError as error:  # of one sandbox; the others go on
            log.error("a sandbox could not be stored or ended: %s", error)
        await asyncio.sleep(REAP_INTERVAL_S)


def build(
    driver_name: str,
    folder: Path,
    prefix: Path,
    images: dict[str, Path],
    limits: Limits,
    policy: KeeperPolicy,
    quota_bytes: int,
) -> tuple[Control, Store]:
    """A control plane over a driver whose sandboxes live below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    makers = machine_drivers(prefix, folder)
    if driver_name != "process" and driver_name not in makers:
        raise ValueError(f"driver={driver_name!r}: choose from process, {', '.join(makers)}")
    mechanism = None if driver_name == "process" else makers[driver_name]()
    store = Store(folder / "snapshots", quota_bytes)
    driver: Driver
    if mechanism is None:
        driver = ProcessDriver(folder / "boxes", store)
        home = Home(path="/", env={})  # the folder itself, which HOME names there
    else:
        driver = MachineDriver(mechanism, folder / "boxes", store)
        home = Home(path="/home/user", env={"HOME": "/home/user"})
    keeper = Keeper(driver, store, folder / "journal", policy)
    config = ControlConfig(images=images, home=home, limits=limits)
    return Control(keeper, Records(folder / "records"), config), store


def serve(control: Control, store: Store, config: ServerConfig, *, host: str, port: int) -> None:
    """Serve until interrupted; what runs is then stored."""
    try:
        app = create_app(control, config)
        uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)
    finally:
        store.close()
