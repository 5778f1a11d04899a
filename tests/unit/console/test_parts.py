"""Parts of pages: texts of strangers, the search, and events."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from falaj.apps.console.components.search import object_hits, page_hits
from falaj.apps.console.components.texts import markdown_html
from falaj.apps.console.live import matches
from falaj.apps.console.times import duration, number, size
from falaj.records.governance.events import Event
from falaj.records.governance.objects import StoredObject


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[a](javascript:alert(1))",
        "![a](javascript:alert(1))",
        '[a](https://x "onmouseover=alert(1)")<svg onload=alert(1)>',
        "[a](&#106;avascript:alert(1))",
        "```\n</code></pre><script>alert(1)</script>\n```",
    ],
)
def test_markdown_of_strangers_has_no_html_of_its_own(text: str) -> None:
    html = markdown_html(text).lower()

    assert "<script" not in html
    assert "<img src=x" not in html
    assert "<svg" not in html
    assert 'href="javascript' not in html
    assert 'src="javascript' not in html


def test_markdown_is_shown_as_such() -> None:
    html = markdown_html("# Title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")

    assert "<h1" in html
    assert "<table" in html


def href(*parts: str, **query: str) -> str:
    return "/".join(("/w/default", *parts)) + "".join(f"?{key}={value}" for key, value in query.items())


def stored(kind: str, name: str) -> StoredObject:
    return StoredObject.model_construct(id=f"{kind}_1", kind=kind, name=name)


def test_objects_lead_to_their_pages_and_others_to_their_lineage() -> None:
    found = [
        stored("model_version", "churn@3"),
        stored("experiment", "e"),
        stored("secret", "pin"),
        stored("job", "j"),
    ]

    hits = object_hits(found, [], href, {"models", "runs", "lineage"})

    assert [hit.target for hit in hits] == [
        "/w/default/models/churn/versions/3",
        "/w/default/runs?experiment=experiment_1",
        "/w/default/lineage/secret_1",
    ]


def test_pages_are_found_by_their_name() -> None:
    assert [hit.label for hit in page_hits("over", href, {"overview", "runs"})] == ["Overview"]
    assert page_hits("jobs", href, {"overview"}) == []


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [("jobs.submit", True), ("jobs.*", True), ("*", True), ("job.*", False), ("jobs.cancel", False)],
)
def test_pages_get_the_events_that_they_listen_to(pattern: str, fits: bool) -> None:
    event = Event(id="e", type="falaj.jobs.submit", subject="s", at=datetime.now(UTC), seq=1, data={})

    assert matches(event, (pattern,)) is fits


def test_figures_are_written_in_few_characters() -> None:
    assert [duration(each) for each in (None, 0.2, 5, 59, 61, 3661, 90000)] == [
        "–", "200ms", "5.0s", "59s", "1m 01s", "1h 01m", "1d 01h",
    ]  # fmt: skip
    assert [duration(timedelta(**each)) for each in ({"hours": 2}, {"days": 7}, {"minutes": 10})] == [
        "2h", "7d", "10m",
    ]  # fmt: skip
    assert [size(each) for each in (None, 0, 1536, 3 << 30)] == ["–", "0 B", "1.5 KiB", "3.0 GiB"]
    assert [number(each) for each in (None, 1, 0.123456, 12345.6, float("inf"))] == [
        "–",
        "1",
        "0.1235",
        "12,346",
        "inf",
    ]
