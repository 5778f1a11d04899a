"""`fj.connect`: credentials, saved tokens, and errors when the platform is not available."""

from __future__ import annotations

import io
import json
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import falaj as fj
from falaj.errors import Internal, InvalidInput, NotFound, TooLarge, Unauthenticated, Unavailable
from falaj.sdk import credentials
from interfaces import ServedPlatform


@pytest.fixture(autouse=True)
def config_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a folder for credentials that belongs to this test."""
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    for name in ("FALAJ_TOKEN", "FALAJ_CA"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "config"


@contextmanager
def answering(raw: bytes) -> Iterator[str]:
    """Yield the address of a server that answers `raw` to every request."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    client.recv(65536)
                    client.sendall(raw)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def name_of(url: str, token: str | None = None) -> str:
    with fj.connect(url, token) as platform:
        return str(platform.users.whoami().principal.name)


# ---------------------------------------------------------------------------------------------- credentials


@pytest.mark.slow
def test_the_token_comes_from_the_caller_then_the_environment_then_the_file(
    served: ServedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials.save(served.url, served.stranger)
    assert name_of(served.url) == "sam"

    monkeypatch.setenv("FALAJ_TOKEN", served.developer)
    assert name_of(served.url) == "dana"

    assert name_of(served.url, served.stranger) == "sam"


def test_a_token_may_have_white_space_around_it(served: ServedPlatform) -> None:
    assert name_of(served.url, f" {served.developer}\n") == "dana"


@pytest.mark.parametrize("token", ["fj_secret.one\ntwo", "fj_secret.é", "fj_secret.\x00"])
def test_a_malformed_token_is_refused_and_not_shown(served: ServedPlatform, token: str) -> None:
    with pytest.raises(Unauthenticated) as caught:
        name_of(served.url, token)

    assert "secret" not in str(caught.value)


def test_without_a_token_the_error_says_how_to_get_one(served: ServedPlatform) -> None:
    with pytest.raises(Unauthenticated, match="FALAJ_TOKEN"):
        fj.connect(served.url)


def test_tokens_are_kept_by_address_for_their_owner_only(config_dir: Path) -> None:
    credentials.save("http://one:1/", "first")
    credentials.save("http://two:2", "second")
    credentials.save("http://one:1", "third")

    file = config_dir / "credentials.json"
    assert json.loads(file.read_text()) == {"http://one:1": "third", "http://two:2": "second"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(config_dir.stat().st_mode) == 0o700
    credentials.forget("http://one:1/")
    with pytest.raises(Unauthenticated):
        credentials.token_for("http://one:1")


def test_a_file_that_others_can_read_is_not_used(config_dir: Path) -> None:
    credentials.save("http://one:1", "first")
    (config_dir / "credentials.json").chmod(0o640)

    with pytest.raises(Unauthenticated, match="chmod 600"):
        credentials.token_for("http://one:1")


@pytest.mark.parametrize("text", ["", "{", "\xff"])
def test_a_broken_file_is_named(config_dir: Path, text: str) -> None:
    credentials.save("http://one:1", "first")
    (config_dir / "credentials.json").write_bytes(text.encode("latin-1"))

    with pytest.raises(Unauthenticated, match=r"credentials\.json is not JSON"):
        credentials.token_for("http://one:1")


def test_concurrent_saves_lose_nothing() -> None:
    names = [f"http://host:{number}" for number in range(24)]
    threads = [threading.Thread(target=credentials.save, args=(name, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [credentials.token_for(name) for name in names] == names


def test_a_sign_in_code_is_exchanged_for_a_token_that_is_saved(served: ServedPlatform) -> None:
    code = served.connect(served.developer).tokens.sign_in_link().code

    assert credentials.sign_in(served.url, code) == (served.url, "dana")

    assert name_of(served.url) == "dana"
    with pytest.raises(Unauthenticated, match="was used or has expired"):
        credentials.sign_in(served.url, code)


# --------------------------------------------------------------------------------- servers that are not Falaj


def test_a_server_that_does_not_answer_is_unavailable_with_its_address() -> None:
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:1 does not answer"):
        name_of("http://127.0.0.1:1", "fj_x.y")


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1", "http://[::1", "http://a:b", ""])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises((InvalidInput, Unavailable)):
        name_of(url, "fj_x.y")


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 5\r\n\r\n<html", Internal),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}", Internal),
        (b"HTTP/1.1 400 Bad\r\ncontent-length: 6\r\n\r\n[1, 2]", Internal),
        (b"SSH-2.0-OpenSSH_9.6\r\n", Unavailable),
        (b"", Unavailable),
    ],
)
def test_a_server_that_is_not_falaj_is_recognized(raw: bytes, error: type[Exception]) -> None:
    with answering(raw) as url, pytest.raises(error, match=r"127\.0\.0\.1"):
        name_of(url, "fj_x.y")


def test_an_unknown_error_code_is_still_an_error() -> None:
    problem = json.dumps({"code": "moon.full", "detail": "wait a week"}).encode()
    raw = b"HTTP/1.1 409 Conflict\r\ncontent-length: %d\r\n\r\n%s" % (len(problem), problem)

    with answering(raw) as url, pytest.raises(fj.FalajError, match="wait a week"):
        name_of(url, "fj_x.y")


def test_an_address_may_end_with_a_slash(served: ServedPlatform) -> None:
    assert name_of(f"{served.url}/", served.developer) == "dana"


def test_another_path_is_not_found(served: ServedPlatform) -> None:
    with pytest.raises(NotFound):
        name_of(f"{served.url}/elsewhere", served.developer)


def test_a_proxy_of_the_environment_is_not_used(
    served: ServedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")

    assert name_of(served.url, served.developer) == "dana"


# ------------------------------------------------------------------------------------------------------ use


def test_put_takes_bytes_files_and_chunks(served: ServedPlatform, tmp_path: Path) -> None:
    data = bytes(range(256)) * 9000
    (tmp_path / "file").write_bytes(data)
    platform = served.platform

    platform.put("bytes", data)
    platform.put("path", tmp_path / "file")
    platform.put("file", io.BytesIO(data))
    platform.put("pieces", (data[i : i + 1000] for i in range(0, len(data), 1000)))

    for name in ("bytes", "path", "file", "pieces"):
        assert platform.get(name) == data


def test_a_refused_upload_says_why_however_large_it_is(served: ServedPlatform) -> None:
    pieces = iter([bytes(1_000_000)] * 20)

    with fj.connect(served.url, "fj_forged.token") as platform, pytest.raises(Unauthenticated):
        platform.blobs.upload(pieces)


def test_a_request_above_the_size_limit_is_too_large(served: ServedPlatform) -> None:
    with pytest.raises(TooLarge, match="at most 1048576 bytes"):
        served.platform.tokens.issue(purpose="x", actions=("blobs.read",) * 100_000)


def test_a_closed_client_raises_a_clear_error(served: ServedPlatform) -> None:
    platform = fj.connect(served.url, served.admin)
    platform.close()

    with pytest.raises((Unavailable, RuntimeError)):
        platform.users.whoami()


def test_neither_the_platform_nor_its_services_show_the_token(served: ServedPlatform) -> None:
    shown = f"{served.platform!r} {served.platform.workspaces!r} {served.platform.workspaces.gate!r}"

    assert served.url in shown
    assert served.admin.rpartition(".")[2] not in shown
