"""The periods of budgets and bills, in UTC."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from falaj.records.scheduling.accounting import Period

WEEK = timedelta(days=7)


def period_at(period: Period, now: datetime, *, since: datetime) -> tuple[datetime, datetime | None]:
    """When the period that `now` is in began, and when the next one does; one that is `none` began at `since`."""
    if period == "none":
        return since, None
    if period == "month":
        return month_at(now)
    day = _midnight(now.astimezone(UTC))
    monday = day - timedelta(days=day.weekday())
    return monday, monday + WEEK


def month_at(moment: datetime) -> tuple[datetime, datetime]:
    """The first moment of its month, and of the next one."""
    first = _midnight(moment.astimezone(UTC)).replace(day=1)
    return first, (first + timedelta(days=32)).replace(day=1)


def by_months(start: datetime, end: datetime) -> Iterator[tuple[datetime, datetime]]:
    """From `start` to `end`, cut where a month begins; a moment without length is one piece."""
    while True:
        _, following = month_at(start)
        if end <= following:
            yield start, end
            return
        yield start, following
        start = following


def _midnight(moment: datetime) -> datetime:
    return moment.replace(hour=0, minute=0, second=0, microsecond=0)
