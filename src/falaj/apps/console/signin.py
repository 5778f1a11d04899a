"""Signing in and out: a sign-in code or a token becomes a session and its cookie."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from falaj.apps.api.errors import error_response
from falaj.apps.console.guard import client_address, json_body, safe_next, session_of
from falaj.apps.console.sessions import ConsoleSession, SessionStore, SignInLimit
from falaj.errors import FalajError, InvalidInput, NotFound, Unauthenticated
from falaj.records.governance.identity import IssuedToken
from falaj.records.record import Record
from falaj.sdk.platform import Platform

log = logging.getLogger("falaj.console")
ASSETS = Path(__file__).parent / "assets"
BODY_BYTES = 8192


class Credential(Record):
    """The body that the sign-in page sends: a code or a token, and the time zone of the browser."""

    code: str | None = None
    token: str | None = None
    zone: str = "UTC"
    next: str = "/"


class SignInRoutes:
    """The sign-in page, and the requests that open and end sessions."""

    def __init__(
        self,
        sessions: SessionStore,
        *,
        cookie: str,
        tls: bool,
        api: str,
        connect: Callable[[str, str], Platform],
        redeem: Callable[[str, str], IssuedToken],
    ) -> None:
        """`connect` opens a platform with a token, `redeem` returns the token of a code; both for an address."""
        self._sessions = sessions
        self._cookie, self._tls, self._api = cookie, tls, api
        self._connect, self._redeem = connect, redeem
        self._limit = SignInLimit()
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="sign-in")

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/signin", self.page, methods=["GET"]),
            Route("/signin", self.refer_to_api, methods=["POST"]),
            Route("/session", self.begin, methods=["POST"]),
            Route("/signout", self.end, methods=["POST"]),
        ]

    async def page(self, request: Request) -> Response:
        """Show the sign-in page; who is signed in already goes on, unless the link has a code for someone else."""
        return FileResponse(ASSETS / "signin.html")

    async def refer_to_api(self, _request: Request) -> Response:
        """Tell `falaj login`, which may be given a link of the console, where codes are redeemed."""
        refused = NotFound("this is the console; the API redeems sign-in codes", details={"api": self._api})
        return error_response(refused)

    async def begin(self, request: Request) -> Response:
        """Open a session."""
        address = client_address(request.scope)
        try:
            self._limit.require(address)
            given = await _read(request)
            cookie, session = await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: self._open(given, address, request.headers.get("user-agent", ""))
            )
        except FalajError as error:
            if isinstance(error, Unauthenticated):
                self._limit.add_failure(address)
            return error_response(error)
        if (earlier := session_of(request.scope)) is not None:
            self._sessions.end(earlier)
        log.info("signed in", extra={"person": session.person, "from": address})
        response = json_body({"next": safe_next(given.next), "person": session.person})
        response.set_cookie(
            self._cookie, cookie, path="/", httponly=True, samesite="strict", secure=self._tls
        )
        return response

    async def end(self, request: Request) -> Response:
        """End the session, and revoke its token if it came from a link."""
        session = session_of(request.scope)
        if session is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, lambda: revoke(session))
            self._sessions.end(session)
        response = RedirectResponse("/signin", 303)
        response.delete_cookie(self._cookie, path="/", httponly=True, samesite="strict", secure=self._tls)
        return response

    def _open(self, given: Credential, address: str, browser: str) -> tuple[str, ConsoleSession]:
        issued = self._redeem(given.code, address) if given.code else None
        platform = self._connect(given.token or "" if issued is None else issued.secret, address)
        try:
            identity = platform.users.whoami()
        except FalajError:
            platform.close()
            raise
        token = None if issued is None else str(issued.token.id)
        return self._sessions.open(
            platform, identity, zone=given.zone, address=address, browser=browser, token=token
        )


def revoke(session: ConsoleSession) -> None:
    """Revoke the token of a session that began with a link; work that it started goes on."""
    if session.token is not None:
        try:
            session.platform.tokens.revoke(session.token, keep_work=True)
        except FalajError as error:  # it may have expired, or the API may be down
            log.warning("a token was not revoked", extra={"reason": str(error)})


async def _read(request: Request) -> Credential:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > BODY_BYTES:
            raise InvalidInput.at("body", given="more", allowed=f"at most {BODY_BYTES} bytes")
    try:
        given = Credential.model_validate(json.loads(body))
    except ValueError:
        given = Credential()
    if bool(given.code) == bool(given.token):
        raise InvalidInput.at("body", allowed="a sign-in code, or a token")
    return given
