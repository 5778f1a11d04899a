"""What an operator opens: readiness without a token, scripts of other sites, and larger bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from falaj.apps.model_server.http.access import HttpAccess, access_of
from falaj.apps.model_server.limits import limits_of
from falaj.records.config import CorsConfig, ServingConfig
from model_servers import RawClient, constant, deployment, request, serving

SITE = "https://app.example.org"
BODY = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'


@contextmanager
def opened(folder: Path, **settings: object) -> Iterator[RawClient]:
    config = ServingConfig.model_validate(settings)
    files = [("m", "1", constant(folder / "m.onnx", 1)), ("forbidden", "1", constant(folder / "f.onnx", 2))]
    with (
        serving(deployment(*files), access=access_of(config), limits=limits_of(config)) as server,
        RawClient(server.port) as client,
    ):
        yield client


# ------------------------------------------------------------------------------------------- readiness


@pytest.mark.parametrize("path", ["/v2/models/m/ready", "/v2/models/m/versions/1/ready"])
def test_readiness_needs_a_token_unless_the_operator_says_otherwise(tmp_path: Path, path: str) -> None:
    with opened(tmp_path) as client:
        closed = client.ask(request("GET", path, token=None))[0]
    with opened(tmp_path, public_readiness=True) as client:
        status, _, body = client.ask(request("GET", path, token=None))

    assert closed == 401
    assert (status, json.loads(body)) == (200, {"name": "m", "ready": True})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/nothing/ready", 404),
        ("GET", "/v2/models/m", 401),
        ("GET", "/v2/models/m/config", 401),
        ("GET", "/v2/models/m/config?x=/ready", 404),
        ("GET", "/v2/models/m/infer/ready", 404),
        ("GET", "/v2/models/../../metrics/ready", 404),
        ("POST", "/v2/models/m/ready", 401),
        ("POST", "/v2/models/m/infer", 401),
        ("GET", "/metrics", 401),
        ("GET", "/v2", 401),
    ],
)
def test_nothing_else_is_public(tmp_path: Path, method: str, path: str, status: int) -> None:
    with opened(tmp_path, public_readiness=True) as client:
        assert client.ask(request(method, path, token=None))[0] == status


def test_a_public_path_takes_no_body(tmp_path: Path) -> None:
    with opened(tmp_path, public_readiness=True) as client:
        assert client.ask(request("GET", "/v2/models/m/ready", b"x" * 100, token=None))[0] == 413


# ------------------------------------------------------------------------------------------------ CORS


def test_a_site_that_is_listed_may_ask_and_read(tmp_path: Path) -> None:
    with opened(tmp_path, cors={"origins": [SITE]}) as client:
        asked, allowed, _ = client.ask(
            request(
                "OPTIONS",
                "/v2/models/m/infer",
                token=None,
                Origin=SITE,
                Access_Control_Request_Method="POST",
            )
        )
        answered, headers, _ = client.ask(request(body=BODY, Origin=SITE))
        again, more, _ = client.ask(request(body=BODY, Origin=SITE))

    assert (asked, allowed["access-control-allow-origin"], allowed["vary"]) == (200, SITE, "Origin")
    assert "Authorization" in allowed["access-control-allow-headers"]
    assert "POST" in allowed["access-control-allow-methods"]
    assert (answered, headers["access-control-allow-origin"]) == (200, SITE)
    assert "Falaj-Prediction" in headers["access-control-expose-headers"]
    assert (again, more["access-control-allow-origin"]) == (200, SITE)
    assert not any("credentials" in name for name in (*allowed, *headers))


def test_errors_can_be_read_too(tmp_path: Path) -> None:
    with opened(tmp_path, cors={"origins": [SITE]}) as client:
        status, headers, _ = client.ask(request(body=BODY, token=None, Origin=SITE))

    assert (status, headers["access-control-allow-origin"]) == (401, SITE)


@pytest.mark.parametrize(
    "origin", ["https://evil.example", SITE + ".evil.example", SITE + "/", "null", "http://app.example.org"]
)
def test_other_sites_get_nothing(tmp_path: Path, origin: str) -> None:
    with opened(tmp_path, cors={"origins": [SITE]}) as client:
        status, headers, _ = client.ask(request(body=BODY, Origin=origin))
        asked, refused, _ = client.ask(request("OPTIONS", token=None, Origin=origin))

    assert (status, asked) == (200, 401)
    assert not any(name.startswith("access-control") for name in (*headers, *refused))


def test_any_site_if_the_operator_says_so(tmp_path: Path) -> None:
    with opened(tmp_path, cors={"origins": ["*"]}) as client:
        _, headers, _ = client.ask(request(body=BODY, Origin="https://anything.example"))
        without, plain, _ = client.ask(request("OPTIONS", token=None))

    assert headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in headers
    assert (without, "access-control-allow-origin" in plain) == (401, False)


def test_without_a_list_browsers_are_told_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as client:
        _, headers, _ = client.ask(request(body=BODY, Origin=SITE))

    assert not any(name.startswith("access-control") for name in headers)


@pytest.mark.parametrize(
    "origin",
    ["", "null", SITE + "/", SITE + "/path", "app.example.org", "ftp://a", "https://a b", "https://a\r\nb"],
)
def test_an_origin_is_a_scheme_and_a_host(origin: str) -> None:
    with pytest.raises(ValidationError):
        CorsConfig(origins=(origin,))


@given(st.binary(max_size=60))
def test_no_origin_of_a_stranger_is_repeated(origin: bytes) -> None:
    lines = HttpAccess(origins=frozenset((SITE.encode(),))).header_lines({b"origin": origin})

    assert lines == b"" or origin == SITE.encode()


# ---------------------------------------------------------------------------------------- larger bodies


def test_the_largest_body_is_set_by_the_operator() -> None:
    usual, small, large = (
        limits_of(ServingConfig.model_validate(each))
        for each in ({}, {"max_body": "1MiB"}, {"max_body": "1GiB"})
    )

    assert (usual.body_bytes, usual.held_bytes) == (2**24, 2**28)
    assert (small.body_bytes, small.held_bytes) == (2**20, 2**28)
    assert (large.body_bytes, large.held_bytes) == (2**30, 2**32)
    for wrong in ("1KiB", "8GiB", "much"):
        with pytest.raises(ValidationError):
            ServingConfig.model_validate({"max_body": wrong})


def test_bodies_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    padded = BODY + b" " * (2**16 - len(BODY))
    with opened(tmp_path, max_body="64KiB") as client:
        assert client.ask(request(body=padded))[0] == 200
        status, _, answer = client.ask(request(body=padded + b" "))

    assert (status, b"limit of 65536 bytes" in answer) == (413, True)


def test_a_body_of_20_mib_where_it_is_allowed(tmp_path: Path) -> None:
    with opened(tmp_path, max_body="32MiB") as client:
        assert client.ask(request(body=BODY + b" " * (20 << 20)))[0] == 200
