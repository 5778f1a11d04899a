"""What a newcomer sees in a prompt or a notebook: names, help, and short texts for results, pages and the platform."""

from __future__ import annotations

import pydoc
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pytest
import torch

import falaj as fj
from falaj.records.governance.objects import Page
from falaj.records.record import Record, html_table
from falaj.training.runtime.options import OPTIONS

HOSTILE = "<script>alert('x')</script>"


class Thing(Record):
    name: str
    about: str | None = None
    parts: tuple[str, ...] = ()


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fj.Platform]:
    with fj.open(tmp_path_factory.mktemp("a<b>") / ".falaj") as opened:
        yield opened


def test_dir_lists_the_public_names() -> None:
    assert dir(fj) == sorted(fj.__all__)


def test_help_of_fit_explains_every_option_and_kind_of_data() -> None:
    words = " ".join(pydoc.render_doc(fj.fit, renderer=pydoc.plaintext).split())

    for name, option in OPTIONS.items():
        assert f"{name} = " in words
        assert " ".join(option.metadata["doc"].split()) in words
    for kind in ("NumPy arrays", "pandas or polars", "DataLoader", "map-style dataset", "Hugging Face"):
        assert kind in words


@pytest.mark.slow
def test_a_result_has_a_short_text_and_a_table() -> None:
    rows = torch.randn(64, 4)
    result = fj.fit(
        torch.nn.Linear(4, 4),
        torch.nn.functional.mse_loss,
        (rows, rows),
        steps=300,
        tune="off",
        evaluate=(rows, rows),
        device="cpu",
    )

    assert repr(result).startswith("<FitResult: step 300, loss ")
    assert "plan fp32, stopped done>" in repr(result)
    assert len(repr(result)) < 200
    assert "<th>best</th>" in result._repr_html_()


def test_a_page_says_how_many_items_it_has_and_how_to_get_more() -> None:
    page = Page[Thing](items=tuple(Thing(name=f"thing-{n}") for n in range(300)), next="thing-299")

    assert repr(page) == str(page) == "<Page of 300 × Thing, more with cursor='thing-299'>"
    assert repr(Page[Thing](items=())) == "<Page of nothing>"


def test_the_table_of_a_page_shows_plain_fields_of_the_first_items() -> None:
    page = Page[Thing](items=tuple(Thing(name=f"thing-{n}", parts=("a",)) for n in range(30)))

    shown = page._repr_html_()

    assert "<th>name</th></tr>" in shown
    assert "thing-19" in shown
    assert "thing-20" not in shown
    assert "… 10 more" in shown


def test_names_of_users_are_escaped_in_tables() -> None:
    page = Page[Thing](items=(Thing(name=HOSTILE, about='" onload="x'),), next=HOSTILE)

    for shown in (page._repr_html_(), html_table(HOSTILE, [HOSTILE], [[HOSTILE]])):
        assert "<script" not in shown
        assert '" onload' not in shown


def test_a_record_leaves_out_what_is_as_by_default() -> None:
    assert repr(Thing(name="a")) == "Thing(name='a')"
    assert repr(Thing(name="a", parts=("x",))) == "Thing(name='a', parts=('x',))"


def test_a_record_is_an_escaped_table_in_a_notebook() -> None:
    shown = Thing(name=HOSTILE)._repr_html_()

    assert "<td>name</td><td>&lt;script&gt;" in shown
    assert "about" not in shown


def test_a_long_value_is_cut() -> None:
    assert len(html_table("t", ["a"], [["x" * 10_000]])) < 400


def test_the_platform_has_a_short_text_and_an_escaped_table(platform: fj.Platform) -> None:
    shown: Any = platform._repr_html_()

    assert repr(platform).startswith("<Falaj platform at ")
    assert "a&lt;b&gt;" in shown
    assert "models" in shown
    assert "jobs" in shown


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_frames_of_pandas_and_polars_are_ingested(platform: fj.Platform, frame: Any) -> None:
    name = f"usage_{frame.__module__.partition('.')[0]}"
    customer = fj.Entity(name="customer", key="customer")
    view = fj.FeatureView(
        name=name, entities=("customer",), columns=(fj.Feature(name="calls", type="integer"),)
    )
    platform.apply([customer, view])
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    rows = frame({"customer": ["ana", "ben"], "event_time": [moment, moment], "calls": [3, 9]})

    assert platform.ingest(name, rows).added == 2


def test_a_page_of_the_platform_is_shown_as_a_table(platform: fj.Platform, tmp_path: Path) -> None:
    platform.put("first", b"bytes")

    page: Any = platform.blobs.list()

    assert repr(page).endswith(" × Blob>")
    assert "first" in page._repr_html_()
