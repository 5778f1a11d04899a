"""The HTTP application: one route per operation, and routes for health, metrics, sign-in and the API document."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
from prometheus_client import Counter, Histogram
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from falaj.apps.api.authentication import TokenAuthenticator, origin_of
from falaj.apps.api.errors import error_response
from falaj.apps.api.headers import SecurityHeaders
from falaj.apps.api.openapi import openapi
from falaj.apps.api.requests import body_stream, idempotency_key, read_body, request_id, typed_input
from falaj.apps.api.responses import ResponseBuilder
from falaj.assembly.platform import LocalPlatform
from falaj.control.lease import held_by
from falaj.control.services import all_operations
from falaj.errors import FalajError, Internal, InvalidInput, NotFound
from falaj.governance.identity.tokens import redeem_link
from falaj.governance.operations.caller import acting_as, on_terms
from falaj.governance.operations.operation import Operation
from falaj.version import VERSION

log = logging.getLogger("falaj.api")
REQUESTS = Counter("falaj_requests_total", "Requests by operation and status", ["operation", "status"])
SECONDS = Histogram("falaj_request_seconds", "Seconds until the answer begins", ["operation"])
PAGES = Path(__file__).parent / "pages"
SIGNED_IN_FOR = "PT12H"

R = TypeVar("R")
Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(platform: LocalPlatform) -> Starlette:
    """Return the application of `platform`."""
    handlers = RequestHandlers(platform)
    operations = all_operations()
    routes = [
        Route(
            op.path,
            handlers.endpoint(op),
            methods=["GET", "POST"] if op.mode.reads and not op.upload else ["POST"],
        )
        for op in operations.values()
    ]
    document = json.dumps(openapi(operations.values(), version=VERSION))
    routes += [
        Route("/healthz", _alive),
        Route("/readyz", handlers.ready),
        Route("/metrics", handlers.metrics),
        Route("/api/v1/openapi.json", handlers.behind_token(document)),
        Route("/signin", handlers.sign_in, methods=["POST"]),
        *(Route(path, _page(name)) for path, name in (("/", "signin.html"), ("/signin.js", "signin.js"))),
    ]
    failures: Any = {HTTPException: _not_routed, Exception: _internal}
    app = Starlette(routes=routes, exception_handlers=failures)
    app.add_middleware(SecurityHeaders, tls=platform.config.server.tls is not None)
    return app


class SignIn(BaseModel):
    """The body that the sign-in page sends."""

    code: str


class RequestHandlers:
    """Handles requests: authenticates the caller, performs the operation in a worker thread, and responds."""

    def __init__(self, platform: LocalPlatform) -> None:
        self._platform = platform
        self._authenticator = TokenAuthenticator(
            platform.authenticator, platform.database, platform.gate.clock
        )
        self._limit = platform.config.server.body_limit_bytes
        self._threads = platform.config.server.threads
        self._limiter: anyio.CapacityLimiter | None = None
        self._upload_limiter: anyio.CapacityLimiter | None = None
        self._responses = ResponseBuilder()

    def endpoint(self, operation: Operation) -> Endpoint:
        async def handle(request: Request) -> Response:
            return await self._respond(request, operation.name, lambda r, i: self._operate(operation, r, i))

        return handle

    async def ready(self, _request: Request) -> Response:
        """Respond whether requests can be served and a controller is active; no token is needed."""

        def has_controller() -> bool:
            with self._platform.database.read() as tx:
                return held_by(tx, now=self._platform.gate.clock()) is not None

        try:
            is_ready = await self._in_thread(has_controller)
        except FalajError:
            is_ready = False
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Respond with platform.metrics for Prometheus."""

        async def scrape(request: Request, ident: str) -> Response:
            def work() -> Response:
                with acting_as(self._authenticator.caller(request)), on_terms(request=ident):
                    found = self._platform.services.platform.metrics()
                return Response(found.text, media_type="text/plain; version=0.0.4")

            return await self._in_thread(work)

        return await self._respond(request, "platform.metrics", scrape)

    async def sign_in(self, request: Request) -> Response:
        """Redeem the code of a sign-in link; respond with a token."""
        return await self._respond(request, "tokens.issue", self._redeem)

    def behind_token(self, document: str) -> Endpoint:
        async def serve(request: Request) -> Response:
            async def show(request: Request, _ident: str) -> Response:
                await self._in_thread(lambda: self._authenticator.caller(request))
                return Response(document, media_type="application/json")

            return await self._respond(request, "openapi", show)

        return serve

    async def _operate(self, operation: Operation, request: Request, ident: str) -> Response:
        caller = await self._in_thread(lambda: self._authenticator.caller(request))
        body = body_stream(request) if operation.upload else await read_body(request, limit=self._limit)
        service = getattr(self._platform.services, operation.group)

        def work() -> Response:
            with acting_as(caller), on_terms(key=idempotency_key(request), request=ident):
                try:
                    given = typed_input(operation, request, body)
                except InvalidInput as error:
                    self._platform.gate.reject(operation, error)
                    raise
                return self._responses.build(
                    operation, self._platform.gate.perform(operation, service, given)
                )

        return await (self._in_upload_thread if operation.upload else self._in_thread)(work)

    async def _redeem(self, request: Request, ident: str) -> Response:
        body = await read_body(request, limit=self._limit)

        def work() -> Response:
            try:
                code = SignIn.model_validate_json(body).code
            except ValidationError:
                raise InvalidInput.at("body", allowed='{"code": "…"}') from None
            gate = self._platform.gate
            with gate.database.write() as tx:
                caller = redeem_link(tx, code, now=gate.clock(), origin=origin_of(request))
            issue = all_operations()["tokens.issue"]
            given = issue.check({"purpose": "signed in by link", "expires_in": SIGNED_IN_FOR})
            with acting_as(caller), on_terms(request=ident):
                return self._responses.build(
                    issue, gate.perform(issue, self._platform.services.tokens, given)
                )

        return await self._in_thread(work)

    async def _respond(
        self, request: Request, name: str, work: Callable[[Request, str], Awaitable[Response]]
    ) -> Response:
        """Return the response of `work`, with errors as problem details; count and log the request."""
        ident, began = request_id(request), time.perf_counter()
        try:
            response = await work(request, ident)
        except FalajError as error:
            response = error_response(error, request=ident)
        except Exception:
            log.exception("request failed", extra={"request": ident, "operation": name})
            response = error_response(
                Internal("internal error; the platform's log has the cause"), request=ident
            )
        seconds = time.perf_counter() - began
        REQUESTS.labels(name, response.status_code).inc()
        SECONDS.labels(name).observe(seconds)
        facts = {
            "request": ident,
            "operation": name,
            "status": response.status_code,
            "ms": round(seconds * 1000, 1),
        }
        log.info("request", extra=facts | {"from": origin_of(request)})
        response.headers["X-Request-ID"] = ident
        return response

    async def _in_upload_thread(self, work: Callable[[], R]) -> R:
        """Run an upload in a thread pool of its own, so that slow uploads do not delay other requests."""
        if self._upload_limiter is None:
            self._upload_limiter = anyio.CapacityLimiter(self._threads)
        return await anyio.to_thread.run_sync(work, limiter=self._upload_limiter)

    async def _in_thread(self, work: Callable[[], R]) -> R:
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(self._threads)
        return await anyio.to_thread.run_sync(work, limiter=self._limiter)


async def _alive(_request: Request) -> Response:
    return JSONResponse({"alive": True})


def _page(name: str) -> Endpoint:
    async def serve(_request: Request) -> Response:
        return FileResponse(PAGES / name)

    return serve


async def _not_routed(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    allowed = (
        "GET and POST for reads, POST for writes" if status == 405 else "the paths in /api/v1/openapi.json"
    )
    unknown = NotFound.at("path", given=f"{request.method} {request.url.path}", allowed=allowed)
    ident = request_id(request)
    response = error_response(unknown, request=ident, status=status)
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    response.headers["X-Request-ID"] = ident
    return response


async def _internal(_request: Request, _error: Exception) -> Response:
    return error_response(Internal("internal error; the platform's log has the cause"))
