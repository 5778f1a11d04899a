"""falaj.toml: valid settings, and errors that name line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from falaj.assembly.config import read_config, reveal
from falaj.errors import ConfigInvalid
from falaj.records.config import Config, KeyFileConfig, LocalFiles


def read(tmp_path: Path, text: str | bytes) -> Config:
    path = tmp_path / "falaj.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_config(path)


def faults(tmp_path: Path, text: str | bytes) -> list[str]:
    with pytest.raises(ConfigInvalid) as raised:
        read(tmp_path, text)
    return [f"{fault.where.removeprefix(str(tmp_path))}: {fault.allowed}" for fault in raised.value.faults]


def test_without_a_file_there_is_one_zone_in_ae(tmp_path: Path) -> None:
    config = read_config(tmp_path / "falaj.toml")

    assert [(name, zone.jurisdiction) for name, zone in config.zones.items()] == [("local", "AE")]
    assert config.server.bind == "127.0.0.1"


def test_the_checkpoint_limit_is_a_size(tmp_path: Path) -> None:
    assert read(tmp_path, '[jobs]\ncheckpoint_limit = "2GiB"').jobs.checkpoint_limit == 2 << 30

    for wrong in ('"lots"', '"-1GiB"', "5", "true"):
        (fault,) = faults(tmp_path, f"[jobs]\ncheckpoint_limit = {wrong}")
        assert "jobs.checkpoint_limit" in fault


def test_the_driver_name_is_optional(tmp_path: Path) -> None:
    text = '[keys]\npath = "/k"\n[zones.a]\njurisdiction = "AE"\nblobs = { path = "/b" }\n'

    config = read(tmp_path, text)

    assert config.keys == KeyFileConfig(path=Path("/k"))
    assert config.zones["a"].blobs == LocalFiles(path=Path("/b"))


def test_every_fault_names_its_line_and_field(tmp_path: Path) -> None:
    text = '[server]\nport = "high"\ncolour = 1\n\n[zones.local]\njurisdiction = "Emirates"\n'

    found = faults(tmp_path, text)

    assert [line.split(":")[1].split(" ")[0] for line in found] == ["2", "3", "6"]
    assert "server.port" in found[0]
    assert "server.colour" in found[1]
    assert "two capital letters" in found[2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("server = [", "Invalid"),
        (b"\xff\xfe", "utf-8"),
        ('[server]\nbind = "0.0.0.0"\n', "without TLS is refused"),
        ('[server]\nbind = "example.com"\n', "without TLS is refused"),
        ('[metadata]\ndriver = "postgres"\n', "needs a url"),
        ('[metadata]\nurl = "env:X"\n', "takes none"),
        (
            '[metadata]\ndriver = "postgres"\nurl = "postgresql://me:secret@host/db"\n',
            "env:NAME or file:PATH",
        ),
        (
            '[zones.a]\njurisdiction="AE"\ndefault=true\n[zones.b]\njurisdiction="DE"\ndefault=true\n',
            "only one",
        ),
        ("[zones]\n", "at least 1"),
        ('[zones."../up"]\njurisdiction="AE"\n', "a name is"),
    ],
)
def test_invalid_configuration_is_refused(tmp_path: Path, text: str | bytes, words: str) -> None:
    assert words in " ".join(faults(tmp_path, text))


def test_a_secret_written_into_the_file_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid) as raised:
        read(tmp_path, '[metadata]\ndriver = "postgres"\nurl = "postgresql://me:hidden@host/db"\n')

    assert "hidden" not in str(raised.value)


def test_loopback_needs_no_tls(tmp_path: Path) -> None:
    for bind in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert read(tmp_path, f'[server]\nbind = "{bind}"\n').server.bind == bind


def test_a_secret_comes_from_the_environment_or_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "pin"
    secret.write_text("1234\n")
    secret.chmod(0o600)
    monkeypatch.setenv("FALAJ_TEST_PIN", "5678")

    assert reveal(f"file:{secret}", field="keys.pin") == "1234"
    assert reveal("env:FALAJ_TEST_PIN", field="keys.pin") == "5678"


@pytest.mark.parametrize("secret", ["env:FALAJ_TEST_UNSET", "file:/nonexistent/pin"])
def test_a_missing_secret_is_reported_without_its_value(secret: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"keys\.pin"):
        reveal(secret, field="keys.pin")


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "pin"
    secret.write_text("the pin")
    secret.chmod(0o644)

    with pytest.raises(ConfigInvalid, match="chmod 600") as raised:
        reveal(f"file:{secret}", field="keys.pin")
    assert "the pin" not in str(raised.value)
