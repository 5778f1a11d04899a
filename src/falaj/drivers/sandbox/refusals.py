"""The errors of starting user code, loaded when there is one: they take pydantic, for which every start would wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from falaj.errors import IsolationRefused


def refused(message: str) -> IsolationRefused:
    from falaj.errors import IsolationRefused

    return IsolationRefused(message)


def refused_at(where: str, *, given: str, allowed: str, fix: str | None = None) -> IsolationRefused:
    from falaj.errors import IsolationRefused

    return IsolationRefused.at(where, given=given, allowed=allowed, fix=fix)
