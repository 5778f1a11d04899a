"""The demonstration waits for the platform, unless a process of it keeps failing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the demonstration that starts its platform."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("demo_running", EXAMPLES / "running.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    sys.modules.pop("stage", None)
    return loaded


def platform_with(failing: dict[str, str]) -> Any:
    return SimpleNamespace(platform=SimpleNamespace(status=lambda: SimpleNamespace(failing=failing)))


def test_it_waits_until_there_is_a_value(running: ModuleType) -> None:
    values = iter([None, "", "there"])

    assert running.wait_until(platform_with({}), lambda: next(values)) == "there"


def test_it_exits_with_the_sentence_where_a_process_keeps_failing(running: ModuleType) -> None:
    platform = platform_with({"controller": "the controller keeps failing"})

    with pytest.raises(SystemExit, match="the controller keeps failing"):
        running.wait_until(platform, lambda: None)
