"""The console names the address of a browser to the API; nobody else can."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from falaj.apps.api.authentication import origin_of
from falaj.apps.api.forwarded_origin import ForwardedOrigin, origin_headers

KEY = "k" * 43


async def origin(request: Request) -> Response:
    seen = [name for name in request.headers if name.startswith("falaj-")]
    return PlainTextResponse(f"{origin_of(request)} {seen}")


@pytest.fixture
def client() -> TestClient:
    return TestClient(ForwardedOrigin(Starlette(routes=[Route("/", origin)]), key=KEY))


def test_the_console_names_the_address_of_a_browser(client: TestClient) -> None:
    assert client.get("/", headers=origin_headers("10.1.2.3", KEY)).text == "remote:10.1.2.3 []"
    assert client.get("/", headers=origin_headers("2001:db8::1", KEY)).text == "remote:2001:db8::1 []"


@pytest.mark.parametrize("key", ["", "wrong", KEY[:-1], KEY + "k"])
def test_nobody_else_does(client: TestClient, key: str) -> None:
    assert client.get("/", headers=origin_headers("10.1.2.3", key)).text == "remote:testclient []"


@pytest.mark.parametrize("address", ["", "localhost", "10.1.2.3, 4.4.4.4", "1.2.3.4\xff"])
def test_what_is_no_address_is_not_taken_for_one(client: TestClient, address: str) -> None:
    headers = {name: value.encode("latin-1") for name, value in origin_headers(address, KEY).items()}

    assert client.get("/", headers=headers).text == "remote:testclient []"
