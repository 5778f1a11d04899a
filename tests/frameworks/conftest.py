"""A platform with the environments of the frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import falaj as fj
from framework_testbed import FrameworkTestbed
from virtualenvs import environment


@pytest.fixture
def make_testbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., FrameworkTestbed]]:
    """Return a function that makes a platform with the named environments."""
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    opened: list[fj.Platform] = []

    def make(*names: str) -> FrameworkTestbed:
        home = tmp_path / "home"
        home.mkdir()
        lines = [f'{name} = "{environment(name)}"' for name in names]
        (home / "falaj.toml").write_text("\n".join(["[jobs.environments]", *lines, ""]))
        opened.append(fj.open(home))
        return FrameworkTestbed(opened[-1], tmp_path)

    yield make
    for platform in opened:
        platform.close()
