"""The application of the console: pages of the framework behind the guard, and the sign-in page."""

from __future__ import annotations

import asyncio
import logging
import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fastapi import FastAPI
from nicegui import Client, core, helpers, ui
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from falaj.apps.console import pages
from falaj.apps.console.components.states import error_card
from falaj.apps.console.frame import draw_frame
from falaj.apps.console.guard import PagePolicies, RequestGuard, console_headers, session_of
from falaj.apps.console.live import LiveFeed
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.sessions import ConsoleSession, SessionStore
from falaj.apps.console.settings import ConsoleSettings
from falaj.apps.console.signin import ASSETS, SignInRoutes
from falaj.apps.security_headers import SecurityHeaders
from falaj.errors import FalajError, Unauthenticated
from falaj.records.governance.identity import IssuedToken
from falaj.sdk.platform import Platform

log = logging.getLogger("falaj.console")
PUBLIC_ASSETS = ("signin.css", "signin.js")
ASSET_NAMES = (*PUBLIC_ASSETS, "console.css", "console.js")
HEAD = '<link rel="stylesheet" href="/assets/console.css"><script src="/assets/console.js" defer></script>'


def find_pages() -> list[ConsolePage]:
    """Return the pages of all modules in `pages/` and its folders."""
    found: list[ConsolePage] = []
    for module in pkgutil.walk_packages(pages.__path__, f"{pages.__name__}."):
        content = import_module(module.name)
        found += getattr(content, "PAGES", [])
        found += [content.PAGE] if hasattr(content, "PAGE") else []
    return found


class Console:
    """The console: its sessions, its pages, and the ASGI application that serves them."""

    def __init__(
        self,
        settings: ConsoleSettings,
        *,
        connect: Callable[[str, str], Platform],
        redeem: Callable[[str, str], IssuedToken],
    ) -> None:
        self.sessions = SessionStore(lasts=settings.session, idle=settings.idle)
        self._settings = settings
        self._feeds: dict[ConsoleSession, LiveFeed] = {}
        self._pages = find_pages()
        self._entries = {page.entry for page in self._pages}
        self._segments = {page.path.split("/")[3] for page in self._pages if page.path.count("/") > 2}
        cookie = f"falaj_console_{urlsplit(settings.url).port}"
        sign_in = SignInRoutes(
            self.sessions,
            cookie=cookie,
            tls=settings.tls is not None,
            api=settings.api,
            connect=connect,
            redeem=redeem,
        )
        self.app = self._assemble(sign_in, cookie)

    def _assemble(self, sign_in: SignInRoutes, cookie: str) -> ASGIApp:
        own = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        own.router.routes += [
            *sign_in.routes(),
            Route("/healthz", _alive),
            Route("/", self._first_page),
            *(Route(f"/assets/{name}", _asset(name)) for name in ASSET_NAMES),
        ]
        for page in self._pages:
            ui.page(page.path, title=f"{page.title} · Falaj", response_timeout=30)(self._drawer(page))
        Client.shared_head_html = HEAD
        core.app.config.socket_io_js_transports = ["websocket"]
        ui.run_with(
            own,
            title="Falaj",
            favicon=ASSETS / "favicon.svg",
            language="en-US",
            binding_refresh_interval=None,
            reconnect_timeout=10,
            tailwind=False,
            show_welcome_message=False,
            gzip_middleware_factory=None,
        )
        guard_sockets(self.sessions)
        remember_signatures()
        scheme = urlsplit(self._settings.url).scheme
        guarded: ASGIApp = PagePolicies(own)
        guarded = GZipMiddleware(guarded, minimum_size=1024, compresslevel=4)
        guarded = RequestGuard(
            guarded, sessions=self.sessions, cookie=cookie, hosts=self._settings.hosts, scheme=scheme
        )
        return SecurityHeaders(guarded, tls=self._settings.tls is not None, headers=console_headers())

    def _drawer(self, page: ConsolePage) -> Callable[..., Any]:
        async def draw(request: Request) -> Response | None:
            session = session_of(request.scope)
            if session is None:  # it ended since the guard let the request in
                return RedirectResponse("/signin", 303)
            theme = request.cookies.get("falaj_theme", "auto")
            is_dark = theme == "dark" or (theme != "light" and request.cookies.get("falaj_scheme") == "dark")
            client = ui.context.client
            context = PageContext(
                page, session, self._feed(session), client, request, self.sessions.end, is_dark=is_dark
            )
            closing = _closer(client)
            session.on_end.append(closing)
            client.on_delete(lambda: session.forget(closing))
            try:
                listed = await context.ask(lambda p: p.workspaces.list(limit=1000))
                context.workspaces = tuple(each.name for each in listed.items)
                problem = None
            except Unauthenticated:
                return RedirectResponse("/signin", 303)
            except FalajError as error:
                problem = error
            frame = draw_frame(
                context, entries=self._entries, segments=self._segments, sessions=self.sessions, theme=theme
            )
            with frame:
                try:
                    if problem is not None:
                        raise problem
                    await page.draw(context)
                except Unauthenticated:
                    return RedirectResponse("/signin", 303)
                except FalajError as error:
                    error_card(error)
            return None

        return draw

    async def _first_page(self, request: Request) -> Response:
        """Go to the overview of a workspace that the person is in."""
        session = session_of(request.scope)
        if session is None:
            return RedirectResponse("/signin", 303)
        names = [grant.workspace for grant in session.identity.grants if grant.workspace != "platform"]
        own = session.identity.workspace or ("default" if not names else names[0])
        return RedirectResponse(f"/w/{own}", 303)

    def _feed(self, session: ConsoleSession) -> LiveFeed:
        feed = self._feeds.get(session)
        if feed is None:
            feed = self._feeds[session] = LiveFeed(
                session.platform, on_refused=lambda: self.sessions.end(session)
            )
            session.on_end.append(lambda: self._feeds.pop(session).close())
        return feed


def remember_signatures() -> None:
    """Let the framework inspect each function once: three times for every element is half the time of drawing."""
    known: dict[object, bool] = {}
    inspect = helpers.expects_arguments

    def expects_arguments(func: Callable[..., Any]) -> bool:
        code = getattr(func, "__code__", None)  # closures of one definition, and bound methods, share it
        if code is None:
            return inspect(func)
        key = code, hasattr(func, "__self__")
        if key not in known:
            known[key] = inspect(func)
        return known[key]

    helpers.expects_arguments = expects_arguments


def guard_sockets(sessions: SessionStore) -> None:
    """Let a socket speak for pages of its own session only: the framework takes any page's id from any socket."""
    handlers = core.sio.handlers["/"]
    connect = handlers["connect"]

    async def connect_own_page(sid: str, environ: dict[str, Any], *rest: Any) -> Any:
        asked = parse_qs(environ.get("QUERY_STRING", "")).get("client_id", [""])[0]
        if _own_session(environ, asked) is None:
            return False
        return await connect(sid, environ, *rest)

    handlers["connect"] = connect_own_page
    for name in ("handshake", "event", "javascript_response", "ack", "log"):
        handlers[name] = _of_own_page(sessions, handlers[name], counts=name == "event")


def _of_own_page(sessions: SessionStore, handle: Callable[..., Any], *, counts: bool) -> Callable[..., Any]:
    async def guarded(sid: str, message: Any, *rest: Any) -> Any:
        asked = message.get("client_id") if isinstance(message, dict) else None
        session = _own_session(core.sio.get_environ(sid) or {}, str(asked))
        if session is None:
            return False
        if counts:
            sessions.touch(session)
        answer = handle(sid, message, *rest)
        return await answer if asyncio.iscoroutine(answer) else answer

    return guarded


def _own_session(environ: dict[str, Any], client: str) -> ConsoleSession | None:
    """Return the session of a socket, if it lasts and the page is one of its own."""
    session, page = session_of(environ.get("asgi.scope", {})), Client.instances.get(client)
    is_own = page is not None and session is not None and session_of(page.request.scope) is session
    return session if is_own and session is not None and not session.ended else None


def _closer(client: Client) -> Callable[[], None]:
    """Return what sends a page to the sign-in page when its session ends, and forgets the page."""
    loop = asyncio.get_running_loop()

    def leave() -> None:
        if not client.is_deleted:
            client.run_javascript("falajSignedOut()")
            loop.call_later(2.0, forget)

    def forget() -> None:
        if not client.is_deleted:
            client.delete()

    def close() -> None:
        loop.call_soon_threadsafe(leave)

    return close


async def _alive(_request: Request) -> Response:
    return Response('{"alive": true}', media_type="application/json")


def _asset(name: str) -> Callable[[Request], Any]:
    async def serve(_request: Request) -> Response:
        return FileResponse(ASSETS / name, headers={"Cache-Control": "no-cache"})

    return serve
