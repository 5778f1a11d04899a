"""The HTTP application: one route per operation, and routes for health, metrics, sign-in and the API document."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
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
from starlette.types import ASGIApp, Receive, Scope, Send

from falaj.apps.api.authentication import INTERFACE, TokenAuthenticator, origin_of
from falaj.apps.api.caller_limits import CallerLimits
from falaj.apps.api.errors import error_response
from falaj.apps.api.forwarded_origin import ForwardedOrigin
from falaj.apps.api.headers import SingleHeaders
from falaj.apps.api.held_entries import HeldEntries
from falaj.apps.api.mlflow.artifacts import PROXY
from falaj.apps.api.mlflow.errors import mlflow_error, not_supported, refused, unknown_route
from falaj.apps.api.mlflow.route import MlflowDialect, MlflowRoute
from falaj.apps.api.mlflow.routes import (
    LEFT_OUT,
    LISTINGS,
    MOUNTS,
    REFUSED,
    ROUTES,
    SERVER_FACTS,
    SERVER_INFO,
)
from falaj.apps.api.openapi import openapi
from falaj.apps.api.requests import (
    HeldBody,
    body_stream,
    idempotency_key,
    read_body,
    request_id,
    typed_input,
)
from falaj.apps.api.responses import ResponseBuilder
from falaj.apps.api.worker_threads import WorkerThreads
from falaj.apps.byte_shares import ByteShares
from falaj.apps.security_headers import SecurityHeaders
from falaj.assembly.platform import LocalPlatform
from falaj.control.lease import held_by
from falaj.control.services import all_operations
from falaj.errors import FalajError, Internal, InvalidInput, NotFound, Unauthenticated
from falaj.governance.audit.log import Draft, held_back
from falaj.governance.identity.tokens import redeem_link, require_link
from falaj.governance.operations.caller import Caller, acting_as, on_terms
from falaj.governance.operations.operation import Mode, Operation
from falaj.version import VERSION

log = logging.getLogger("falaj.api")
REQUESTS = Counter("falaj_requests_total", "Requests by operation and status", ["operation", "status"])
SECONDS = Histogram("falaj_request_seconds", "Seconds until the answer begins", ["operation"])
PAGES = Path(__file__).parent / "pages"
SIGNED_IN_FOR = "PT12H"
SIGN_IN_BYTES, SIGN_IN_S, SIGN_IN_THREADS = 4096, 10.0, 4
"""The body of a sign-in, how long it may take to arrive, and how many are checked at a time."""
HELD_BYTES = 256 * 2**20
"""Bytes of all bodies in memory; uploads are streams and not among them."""
CALLER_SHARE = 4
"""A caller may have this part of the threads for uploads, and of those for other long operations."""

SHORT_THREADS = 6
"""Threads for operations on the database alone. More of them only fight over the interpreter lock."""
LONG = frozenset({Mode.FREE, Mode.LATE})
"""Operations that may take long: they read and write stores outside the database."""

R = TypeVar("R")
Endpoint = Callable[[Request], Awaitable[Response]]
Work = Callable[..., Response]


def make_app(platform: LocalPlatform, *, origin_key: str | None = None) -> Starlette:
    """Return the application of `platform`; with `origin_key` the console names the addresses of its browsers."""
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
    routes += mlflow_routes(handlers, operations)
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
    app.add_middleware(
        OperationPaths, endpoints={route.path: route for route in routes if route.path in handlers.paths}
    )
    app.add_middleware(SingleHeaders, failures=platform.failures)
    app.add_middleware(SecurityHeaders, tls=platform.config.server.tls is not None)
    if origin_key:
        app.add_middleware(ForwardedOrigin, key=origin_key)
    return app


def mlflow_routes(handlers: RequestHandlers, operations: Mapping[str, Operation]) -> list[Route]:
    """Return the routes of MLflow's API; what is unknown there, or left out, has an error of MLflow's."""
    found = [
        Route(each.path, handlers.mlflow_endpoint(each, operations[each.operation]), methods=[each.method])
        for each in ROUTES
    ]
    listings = {
        kind: handlers.mlflow_endpoint(each, operations[each.operation]) for kind, each in LISTINGS.items()
    }
    found.append(Route(PROXY, _artifact_listing(handlers, listings), methods=["GET"]))
    found.append(Route(SERVER_INFO, handlers.mlflow_behind_token(_server_info)))
    unknown = handlers.mlflow_behind_token(_not_in_mlflow)
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    return [*found, *(Route(f"{each}/{{rest:path}}", unknown, methods=methods) for each in MOUNTS)]


def _artifact_listing(handlers: RequestHandlers, listings: Mapping[str, Endpoint]) -> Endpoint:
    """Return the endpoint that lists artifacts; the object that they belong to is in the query."""
    unknown = handlers.mlflow_behind_token(_unknown_listing)

    async def serve(request: Request) -> Response:
        kind, _, rest = request.query_params.get("path", "").strip("/").partition("/")
        owner, _, folder = rest.partition("/")
        root, _, below = folder.partition("/")
        if kind not in listings or root != "artifacts":
            return await unknown(request)
        request.scope["path_params"] = {"owner": owner, "folder": below}
        return await listings[kind](request)

    return serve


def _unknown_listing(request: Request) -> Response:
    raise NotFound.at(
        "path",
        given=request.query_params.get("path"),
        allowed="runs/ID/artifacts, models/ID/artifacts or versions/NAME@NUMBER/artifacts",
    )


def _server_info(_request: Request) -> Response:
    return JSONResponse(SERVER_FACTS)


def _not_in_mlflow(request: Request) -> Response:
    if request.url.path in REFUSED:
        return refused(REFUSED[request.url.path])
    part = request.path_params["rest"].partition("/")[0]
    if part in LEFT_OUT:
        return not_supported(LEFT_OUT[part])
    return unknown_route(request.method, request.url.path)


class OperationPaths:
    """Middleware that finds an operation by its path at once; the router tries one route after another."""

    def __init__(self, app: ASGIApp, *, endpoints: Mapping[str, Route]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if route is None or route.methods is None or scope["method"] not in route.methods:
            await self._app(scope, receive, send)
            return
        response = await route.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


class SignIn(BaseModel):
    """The body that the sign-in page sends."""

    code: str


class RequestHandlers:
    """Handles requests: authenticates the caller, performs the operation in a worker thread, and responds."""

    def __init__(self, platform: LocalPlatform) -> None:
        self._platform = platform
        self._authenticator = TokenAuthenticator(
            platform.authenticator, platform.database, platform.gate.clock, platform.failures
        )
        self._shares = ByteShares(HELD_BYTES)
        self._limit = platform.config.server.body_limit_bytes
        self._threads = platform.config.server.threads
        self._limiter: anyio.CapacityLimiter | None = None
        self._upload_limiter: anyio.CapacityLimiter | None = None
        self._sign_in_limiter: anyio.CapacityLimiter | None = None
        each = max(1, self._threads // CALLER_SHARE)
        self._uploads, self._long = CallerLimits(each), CallerLimits(each)
        self._responses = ResponseBuilder()
        self._short = WorkerThreads(min(SHORT_THREADS, self._threads))
        self._entries = HeldEntries(platform.audit.append_all)
        self.paths: dict[str, Endpoint] = {}

    def endpoint(self, operation: Operation) -> Endpoint:
        async def handle(request: Request) -> Response:
            return await self._respond(request, operation.name, lambda r, i: self._operate(operation, r, i))

        self.paths[operation.path] = handle
        return handle

    def mlflow_endpoint(self, route: MlflowRoute, operation: Operation) -> Endpoint:
        dialect = MlflowDialect(route, self._responses)

        async def handle(request: Request) -> Response:
            return await self._respond(
                request, operation.name, lambda r, i: self._operate(operation, r, i, dialect), mlflow_error
            )

        if "{" not in route.path and route.path != PROXY:
            self.paths[route.path] = handle
        return handle

    async def ready(self, _request: Request) -> Response:
        """Respond whether requests can be served and a controller is active; no token is needed."""

        def has_controller() -> bool:
            with self._platform.database.read() as tx:
                return held_by(tx, now=self._platform.gate.clock()) is not None

        try:
            is_ready = await self._short.run(has_controller)
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
        return self._known_callers(
            lambda _: Response(document, media_type="application/json"), error_response
        )

    def mlflow_behind_token(self, respond: Callable[[Request], Response]) -> Endpoint:
        """Return an endpoint of MLflow's API that performs no operation."""
        return self._known_callers(respond, mlflow_error)

    def _known_callers(
        self, respond: Callable[[Request], Response], failed: Callable[..., Response]
    ) -> Endpoint:
        async def serve(request: Request) -> Response:
            async def show(request: Request, _ident: str) -> Response:
                await self._in_thread(lambda: self._authenticator.require_valid(request))
                return respond(request)

            return await self._respond(request, "openapi", show, failed)

        return serve

    async def _operate(
        self, operation: Operation, request: Request, ident: str, dialect: MlflowDialect | None = None
    ) -> Response:
        caller = self._authenticator.recall(request)
        if caller is None:
            caller = await self._short.run(lambda: self._authenticator.caller(request))
        if (introduce := getattr(request.state, "introduce", None)) is not None:
            introduce(caller.id)
        if operation.upload:
            async with self._uploads.slot(caller.id):
                work = self._work(operation, request, ident, caller, body_stream(request), dialect)
                return await self._in_upload_thread(work)
        held = HeldBody(self._shares, caller.id)
        try:
            body = await read_body(request, limit=self._limit, held=held)
            work = self._work(operation, request, ident, caller, body, dialect)
            if operation.mode in LONG:
                async with self._long.slot(caller.id):  # it may wait for a parser, or for memory
                    return await self._in_thread(work)
            return await self._shortly(work)
        finally:
            held.release()

    async def _shortly(self, work: Work) -> Response:
        """Do `work` in one of a few threads; its audit entries are committed meanwhile, before it is answered."""
        committed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def held() -> tuple[Response | Exception, list[Draft], bool]:
            begun = False

            def commit() -> None:
                nonlocal begun
                if begun := bool(drafts):
                    self._entries.begin([*drafts], committed)
                    drafts.clear()

            with held_back() as drafts:
                try:
                    return work(commit), drafts, begun
                except Exception as error:
                    return error, drafts, begun

        outcome, drafts, begun = await self._short.run(held)
        if begun:
            await committed
        if drafts:
            await self._entries.append(drafts)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _work(
        self,
        operation: Operation,
        request: Request,
        ident: str,
        caller: Caller,
        body: bytes | Iterator[bytes],
        dialect: MlflowDialect | None,
    ) -> Work:
        """Return what performs the operation, in a thread; it calls `performed` before it makes the response."""
        service = getattr(self._platform.services, operation.group)

        def work(performed: Callable[[], None] = lambda: None) -> Response:
            with acting_as(caller), on_terms(key=idempotency_key(request), request=ident):
                message = None
                try:
                    if dialect is None:
                        given = typed_input(operation, request, body)
                    else:
                        given, message = dialect.arguments(operation, request, body)
                except InvalidInput as error:
                    self._platform.gate.reject(operation, error)
                    raise
                result = self._platform.gate.perform(operation, service, given)
                performed()
                if dialect is None:
                    return self._responses.build(operation, result, caller=caller.id)
                return dialect.response(operation, message, result, caller=caller.id)

        return work

    async def _redeem(self, request: Request, ident: str) -> Response:
        origin = origin_of(request)
        held = HeldBody(self._shares, origin)
        try:
            body = await read_body(request, limit=SIGN_IN_BYTES, held=held, within_s=SIGN_IN_S)
        finally:
            held.release()

        def work() -> Response:
            try:
                code = SignIn.model_validate_json(body).code
            except ValidationError:
                raise InvalidInput.at("body", allowed='{"code": "…"}') from None
            gate = self._platform.gate
            try:
                with gate.database.read() as tx:  # strangers do not get to write
                    require_link(tx, code)
                with gate.database.write() as tx:
                    digest = gate.audit.digest
                    caller = redeem_link(tx, code, now=gate.clock(), origin=origin, digest=digest)
            except Unauthenticated:
                self._platform.failures.add("refused_code", origin, interface=INTERFACE)
                raise
            issue = all_operations()["tokens.issue"]
            given = issue.check({"purpose": "signed in by link", "expires_in": SIGNED_IN_FOR})
            with acting_as(caller), on_terms(request=ident):
                result = gate.perform(issue, self._platform.services.tokens, given)
                return self._responses.build(issue, result, caller=caller.id)

        if self._sign_in_limiter is None:
            self._sign_in_limiter = anyio.CapacityLimiter(SIGN_IN_THREADS)
        return await anyio.to_thread.run_sync(work, limiter=self._sign_in_limiter)

    async def _respond(
        self,
        request: Request,
        name: str,
        work: Callable[[Request, str], Awaitable[Response]],
        failure: Callable[..., Response] = error_response,
    ) -> Response:
        """Return the response of `work`, with errors as `failure` writes them; count and log the request."""
        ident, began = request_id(request), time.perf_counter()
        try:
            response = await work(request, ident)
        except FalajError as error:
            response = failure(error, request=ident)
        except Exception:
            log.exception("request failed", extra={"request": ident, "operation": name})
            response = failure(Internal("internal error; the platform's log has the cause"), request=ident)
        # Called when this task waits next: after the response is written.
        asyncio.get_running_loop().call_soon(
            _note_request, ident, name, response.status_code, time.perf_counter() - began, origin_of(request)
        )
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


def _note_request(ident: str, name: str, status: int, seconds: float, origin: str) -> None:
    """Count and log a request that was answered."""
    REQUESTS.labels(name, status).inc()
    SECONDS.labels(name).observe(seconds)
    facts = {"request": ident, "operation": name, "status": status, "ms": round(seconds * 1000, 1)}
    log.info("request", extra=facts | {"from": origin})


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
