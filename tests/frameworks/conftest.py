"""A platform with the environments of the frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import falaj as fj
from framework_ground import Ground
from virtualenvs import environment


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ground]]:
    """Makes a platform that has the environments named."""
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    opened: list[fj.Platform] = []

    def make(*names: str) -> Ground:
        home = tmp_path / "home"
        home.mkdir()
        lines = [f'{name} = "{environment(name)}"' for name in names]
        (home / "falaj.toml").write_text("\n".join(["[jobs.environments]", *lines, ""]))
        opened.append(fj.open(home))
        return Ground(opened[-1], tmp_path)

    yield make
    for platform in opened:
        platform.close()
