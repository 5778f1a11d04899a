"""Events of the platform itself: queues, users, groups, tokens and keys belong to no workspace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from falaj.apps.console.page import PageContext, Region

PLATFORM = "platform"


def follow_platform(context: PageContext, events: Iterable[str], region: Region[Any]) -> None:
    """Draw a region again when such an event of the platform comes; who may not see those is shown none."""
    context.live(region.refresh, events=events, workspace=PLATFORM)
