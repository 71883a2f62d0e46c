"""The HTTP server: OpenAI's protocol over the engine.

What it guards: bodies above a size, keys, what a client may see of an error (never a path or a
traceback), disconnects (the sequence is freed before the next step), shutdown (what runs may end).
What it does not: TLS, rates per client, and who may read the metrics; put a proxy in front. It
listens on the loopback unless told otherwise.
"""

import asyncio
import hmac
import json
import logging
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from baltoro.serve.background import BackgroundEngine, EngineStopped
from baltoro.serve.choices import Choices
from baltoro.serve.document import ERRORS, RESPONSES, request_body
from baltoro.serve.draft import SpeculationConfig
from baltoro.serve.engine import Engine, EngineConfig, WeightsNotWhole
from baltoro.serve.generate import described, load_for_text
from baltoro.serve.grammar import Grammars
from baltoro.serve.kinds import ChatChoices, TextChoices
from baltoro.serve.listen import Listener
from baltoro.serve.metrics import Metrics
from baltoro.serve.options import DEFAULTS, ServeOptions, ServerConfig
from baltoro.serve.protocol import (
    AbortBody,
    ApiError,
    ChatBody,
    CompletionBody,
    TokenizeBody,
    invalid,
    refuse_unsupported,
    sse,
    without_nulls,
)
from baltoro.serve.resident import OPERATORS, waiting_operators
from baltoro.serve.scheduler import Overloaded, SchedulerConfig
from baltoro.text.processor import Processor, Prompt

log = logging.getLogger(__name__)
FAULT = ApiError(500, "internal error")
GONE = 499  # nobody reads this answer; it stands in logs
PAGE = Path(__file__).with_name("page")
PAGE_FILES = {  # path, file and type of the chat page
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
B = TypeVar("B", bound=BaseModel)


class Server:
    """The handlers and what they share."""

    def __init__(self, engine: Engine, processor: Processor, config: ServerConfig) -> None:
        self.config = config
        self.processor = processor
        self.metrics = Metrics()
        self.grammars = Grammars(processor.tokenizer)
        self.background = BackgroundEngine(engine)
        self._running: WeakValueDictionary[str, Choices] = WeakValueDictionary()  # by id

    async def complete(
        self,
        request: Request,
        kind: type[Choices],
        body_type: type[ChatBody] | type[CompletionBody],
    ) -> Response:
        """Serve a completion, streamed or whole."""
        self._authorise(request)
        with self.background.arriving():
            body: ChatBody | CompletionBody = await self._body(request, body_type)
            if isinstance(body, ChatBody) and body.reasoning_effort is None:
                body.reasoning_effort = self.config.default_effort
            body.check()
            self.check_model(body.model)
            choices = kind(
                body, self.processor, self.background, self.metrics, self.config, self.grammars
            )
            if choices.id in self._running:
                raise ApiError(
                    400,
                    f"request_id: {choices.id} is running already; give each request its own",
                    param="request_id",
                )
            self._running[choices.id] = choices
            try:
                await self._start(choices)
            except BaseException:
                self._running.pop(choices.id, None)
                raise
        response: Response
        if choices.body.stream:
            response = StreamingResponse(self._events(choices), media_type="text/event-stream")
        else:
            response = await self._whole(request, choices)
        response.headers["x-request-id"] = choices.id
        return response

    async def abort(self, request: Request) -> Response:
        """End a request's replies, which are answered as far as they have come.

        Whoever may ask for replies may end any whose id they know.
        """
        self._authorise(request)
        body = await self._body(request, AbortBody)
        choices = self._running.get(body.request_id)
        if choices is None:
            message = f"request_id: {body.request_id!r} is not running"
            raise ApiError(404, message, param="request_id", code="not_found")
        choices.abort()
        return JSONResponse({"request_id": choices.id, "object": "abort"})

    async def _start(self, choices: Choices) -> None:
        """Queue a request. Raises `ApiError` for one that cannot be served, or not now.

        Raises `EngineStopped` and `WeightsNotWhole` too, which are answered as one.
        """
        try:
            await choices.start(await asyncio.to_thread(choices.prompts))
        except Overloaded as error:
            self.metrics.rejected["overloaded"] += 1
            wait_s = self._wait_s(error)
            raise ApiError(503, str(error), code="overloaded", retry_after=wait_s) from None
        except ValueError as error:
            self.metrics.rejected["invalid"] += 1
            raise choices.refusal(error) from None

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` for another model than the one that is served."""
        if name and name != self.config.model_name:
            message = f"model: {name!r} is not here; {self.config.model_name!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def tokenize(self, request: Request) -> Response:
        """The ids of a text or of a conversation's prompt."""
        self._authorise(request)
        body = await self._body(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: give either prompt or messages", param="prompt")
        try:
            if body.prompt is not None:
                ids = await asyncio.to_thread(self.processor.tokenizer.encode, body.prompt)
            else:
                ids = (await asyncio.to_thread(self._chat_prompt, body)).ids
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from None
        return JSONResponse({"tokens": ids, "count": len(ids)})

    def _chat_prompt(self, body: TokenizeBody) -> Prompt:
        effort = self.config.default_effort
        thinks = effort != "none"
        return self.processor.prompt(
            body.messages or [],
            body.tools,
            thinking=thinks,
            thinking_effort=effort if thinks else None,
        )

    async def _events(self, choices: Choices) -> AsyncIterator[str]:
        """Server-sent events; an error after the first byte is one more event."""
        try:
            async for chunk in choices.chunks():
                yield sse(chunk)
        except ApiError as error:
            yield sse(error.body())
            return
        except Exception:  # a fault of ours: the handlers of these have no say any more
            log.exception("a stream failed")
            yield sse(FAULT.body())
            return
        finally:
            choices.cancel()
            self._running.pop(choices.id, None)
        yield "data: [DONE]\n\n"

    async def _whole(self, request: Request, choices: Choices) -> Response:
        """The whole answer, or nothing if the client leaves first; then its sequences are freed."""
        work = asyncio.ensure_future(choices.whole())
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return JSONResponse(work.result())
            return Response(status_code=GONE)
        finally:
            for task in (work, gone):
                task.cancel()
            choices.cancel()
            self._running.pop(choices.id, None)

    async def _body(self, request: Request, body_type: type[B]) -> B:
        raw = bytearray()
        try:
            async for part in request.stream():
                raw += part
                if len(raw) > self.config.max_body_bytes:
                    limit = self.config.max_body_bytes
                    raise ApiError(413, f"the body is above {limit} bytes", code="too_large")
        except ClientDisconnect:
            raise ApiError(GONE, "the client left before its body was whole") from None
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError):
            raise ApiError(400, "the body is not JSON", code="invalid_json") from None
        if not isinstance(data, dict):
            raise ApiError(400, "the body must be a JSON object", code="invalid_json")
        refuse_unsupported(data)
        try:
            return body_type.model_validate(without_nulls(data))
        except ValidationError as error:
            raise invalid(error) from None

    def _authorise(self, request: Request) -> None:
        keys = self.config.api_keys
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        offered = given.strip().encode()
        known = [hmac.compare_digest(offered, key.encode()) for key in keys]
        if keys and not (scheme.lower() == "bearer" and any(known)):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    def _wait_s(self, error: Overloaded) -> int:
        """Seconds in which what waits should be done, at the speed so far."""
        stats = self.background.engine.stats
        speed = stats.computed_tokens / stats.busy_s if stats.busy_s else 0.0
        return max(1, min(600, math.ceil(error.queued_tokens / speed))) if speed else 1


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(server: Server) -> FastAPI:
    """The routes."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await server.background.drain(server.config.drain_s)

    app = FastAPI(title="baltoro", lifespan=lifespan, docs_url=None, redoc_url=None)
    engine = server.background.engine

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return JSONResponse(error.body(), error.status, error.headers())

    async def on_stopped(request: Request, error: Exception) -> Response:
        server.metrics.rejected["stopped"] += 1
        shown = ApiError(503, str(error), code="unavailable", retry_after=5)
        return await on_api_error(request, shown)

    async def on_http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        shown = ApiError(error.status_code, str(error.detail))
        return JSONResponse(shown.body(), error.status_code, error.headers)

    async def on_fault(_: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return JSONResponse(FAULT.body(), FAULT.status)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(EngineStopped, on_stopped)
    app.add_exception_handler(WeightsNotWhole, on_stopped)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_fault)

    chat_body, text_body = (
        request_body(kind, server.config.model_name) for kind in (ChatBody, CompletionBody)
    )

    @app.post("/v1/chat/completions", openapi_extra=chat_body, responses=RESPONSES)
    async def chat_completions(request: Request) -> Response:
        return await server.complete(request, ChatChoices, ChatBody)

    @app.post("/v1/completions", openapi_extra=text_body, responses=RESPONSES)
    async def completions(request: Request) -> Response:
        return await server.complete(request, TextChoices, CompletionBody)

    @app.post("/tokenize", openapi_extra=request_body(TokenizeBody), responses=ERRORS)
    async def tokenize(request: Request) -> Response:
        return await server.tokenize(request)

    @app.post("/abort", openapi_extra=request_body(AbortBody), responses=ERRORS)
    async def abort(request: Request) -> Response:
        return await server.abort(request)

    entry = {
        "id": server.config.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "baltoro",
        "max_model_len": engine.model.config.max_seq_len,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return entry

    @app.get("/health", response_class=Response, responses={503: {"description": "stopped"}})
    async def health() -> Response:
        return Response(status_code=200 if server.background.is_alive else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        kind = "text/plain; version=0.0.4"
        return PlainTextResponse(server.metrics.text(engine), media_type=kind)

    for path, (name, kind) in PAGE_FILES.items():
        app.get(path, include_in_schema=False)(_page((PAGE / name).read_bytes(), kind))
    return app


def _page(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    """The handler of one file of the chat page."""
    headers = {"content-security-policy": PAGE_POLICY, "x-content-type-options": "nosniff"}

    async def page() -> Response:
        return Response(content, headers=headers, media_type=kind)

    return page


def serve(checkpoint: str, *, options: ServeOptions = DEFAULTS) -> None:
    """Serve the model in CHECKPOINT with OpenAI's protocol.

    Args:
        checkpoint: directory in the official layout, with its tokenizer.
    """
    config = options.server_config(checkpoint)
    # by a thread that ends: where two threads have a team of OpenMP's each, the teams outnumber the
    # cores and do not spin, and a step of the engine in its own thread takes twice as long
    with ThreadPoolExecutor(1) as loader:
        engine = loader.submit(_engine, checkpoint, options).result()
    server = Server(engine, engine.model.processor, config)
    app = create_app(server)
    settings = uvicorn.Config(app, host=options.host, port=options.port, log_level="warning")
    with suppress(KeyboardInterrupt):
        Listener(settings, server.background, config.drain_s).run()


def _engine(checkpoint: str, options: ServeOptions) -> Engine:
    num_prefill = options.max_prefill_tokens
    if num_prefill is None and options.device == "cpu":
        num_prefill = 2 * options.max_step_tokens
    limits = SchedulerConfig(
        max_running=options.max_running,
        max_step_tokens=options.max_step_tokens,
        max_prefill_tokens=num_prefill,
        max_queued=options.max_queued,
        max_queued_tokens=options.max_queued_tokens,
    )
    config = EngineConfig(
        pool_tokens=options.pool_tokens,
        host_bytes=options.host_bytes,
        cold_states=options.cold_states,
        speculation=None if options.draft is None else SpeculationConfig(draft=options.draft),
        scheduler=limits,
    )
    model = load_for_text(
        checkpoint, dtype=options.dtype, device=options.device, experts=options.experts
    )
    if options.draft is None and not waiting_operators(model.config, OPERATORS):
        config = replace(config, decode="resident")
    engine = Engine(model, config)
    unit, size = engine.layout.hash_block, engine.layout.page_size
    print(
        f"{described(model)}; {config.decode} decoding; prefixes are reused from {unit} "
        f"tokens on (pages of {size}), {engine.cache.config.num_pages} pages",
        file=sys.stderr,
    )
    return engine
