"""Which platform `fj.connect` means without an address."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import falaj as fj
from falaj.assembly.home import open_home
from falaj.errors import Unavailable


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FALAJ_URL", "FALAJ_HOME", "FALAJ_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    (tmp_path / "project" / "notebooks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project" / "notebooks")


def test_the_platform_that_runs_on_the_home_above_is_meant(tmp_path: Path) -> None:
    home = open_home(tmp_path / "project" / ".falaj")

    with home.lock():
        home.running.write_text(json.dumps({"url": "http://127.0.0.1:7482", "pid": os.getpid()}))
        with fj.connect(token="falaj_secret") as platform:
            assert platform.where == "http://127.0.0.1:7482"
    with pytest.raises(Unavailable, match="falaj up"):  # it has ended, and left its file
        fj.connect(token="falaj_secret")


def test_an_address_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_URL", "http://there:1")

    assert fj.connect(token="falaj_secret").where == "http://there:1"
    assert fj.connect("http://named:1", token="falaj_secret").where == "http://named:1"


def test_nothing_is_created_where_nothing_runs(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no platform runs on"):
        fj.connect()

    assert not list(tmp_path.rglob(".falaj"))
