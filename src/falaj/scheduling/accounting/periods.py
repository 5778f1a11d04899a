"""The periods of budgets and bills, in UTC."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from falaj.records.scheduling.accounting import Period

WEEK = timedelta(days=7)


def period_at(period: Period, now: datetime, *, since: datetime) -> tuple[datetime, datetime | None]:
    """Return the begin and end of the period of `now`; the period `none` begins at `since` and has no end."""
    if period == "none":
        return since, None
    if period == "month":
        return month_at(now)
    day = _midnight(now.astimezone(UTC))
    monday = day - timedelta(days=day.weekday())
    return monday, monday + WEEK


def month_at(moment: datetime) -> tuple[datetime, datetime]:
    """Return the begin of the month and of the next one."""
    first = _midnight(moment.astimezone(UTC)).replace(day=1)
    return first, (first + timedelta(days=32)).replace(day=1)


def by_months(start: datetime, end: datetime) -> Iterator[tuple[datetime, datetime]]:
    """Yield the time range split at the begin of months; an empty range is one piece."""
    while True:
        _, following = month_at(start)
        if end <= following:
            yield start, end
            return
        yield start, following
        start = following


def _midnight(moment: datetime) -> datetime:
    return moment.replace(hour=0, minute=0, second=0, microsecond=0)
