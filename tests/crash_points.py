"""Stops a reconciler between any two of its effects, as kill -9 would, by an exception that nothing catches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from falaj.control.jobs.context import ControllerContext
from job_harness import JobHarness

LAUNCHER = ("start", "state", "stop", "delete")


class Killed(BaseException):
    """The reconciler's process is gone."""


class CrashPoint:
    """Kills the reconciler before or after its n-th call of the launcher or the database."""

    def __init__(
        self, harness: JobHarness, monkeypatch: pytest.MonkeyPatch, *, launcher: tuple[str, ...] = LAUNCHER
    ) -> None:
        self.left: int | None = None
        watched = (
            (harness.launcher, launcher),
            (harness.platform.parts.gate, ("commit",)),
            (ControllerContext, ("update_job",)),
        )
        for owner, names in watched:
            for name in names:
                monkeypatch.setattr(owner, name, self._around(getattr(owner, name)))

    def _around(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self._step()
            result = real(*args, **options)
            self._step()
            return result

        return call

    def _step(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Killed
