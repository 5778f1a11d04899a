"""A receiver of webhooks on this machine, and a platform that may send to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from platforms import OwnPlatform, make_platform
from webhook_receivers import ALLOWED, Deliveries, Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            made.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(made.answers.pop(0) if made.answers else 204)
            self.send_header("location", made.url + "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}/hook"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(params=["sqlite", "postgres"])
def sending(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OwnPlatform]:
    """A platform whose webhooks may send to this machine."""
    if request.param == "sqlite":
        with make_platform(tmp_path, toml=ALLOWED) as made:
            yield made
        return
    url = request.getfixturevalue("schema_on_postgres")
    with make_platform(tmp_path, url, ALLOWED, environment=monkeypatch) as made:
        yield made


@pytest.fixture
def deliveries(sending: OwnPlatform) -> Iterator[Deliveries]:
    made = Deliveries.of(sending)
    yield made
    made.delivery.close()
