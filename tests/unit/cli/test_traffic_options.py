"""What is typed for traffic and lookups: routes with shadows and fallback, rules for missing features."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from falaj.apps.cli.commands import endpoints_deploy
from falaj.control.pipelines import canary
from falaj.errors import InvalidInput
from falaj.records.names import ObjectId
from falaj.records.serving.endpoints import Route, ServedRoute
from falaj.records.serving.lookups import Lookup


def lookup(missing: list[str], impute: list[str] | None = None, max_age: list[str] | None = None) -> Lookup:
    typed: dict[str, Any] = endpoints_deploy._lookup(
        ["calls", "bills=customer"], [], missing, impute or [], max_age or []
    )
    return Lookup.model_validate(typed)


def test_rules_are_for_all_features_for_a_view_or_for_one() -> None:
    found = lookup(["0", "bills:reject", "calls__minutes=12.5"])

    assert (found.missing, found.defaults) == (0.0, {"calls__minutes": 12.5})
    assert [(view.view, view.keys, view.missing) for view in found.views] == [
        ("calls", (), None),
        ("bills", ("customer",), "reject"),
    ]


def test_imputed_values_and_ages_are_typed_by_name() -> None:
    found = lookup(["impute"], ["minutes=3", "amount=-1e3"], ["calls=1h"])
    all_views = lookup([], None, ["30m"])

    assert (found.missing, found.imputed) == ("impute", {"minutes": 3.0, "amount": -1000.0})
    assert [view.max_age for view in found.views] == [timedelta(hours=1), None]
    assert [view.max_age for view in all_views.views] == [timedelta(minutes=30)] * 2


@pytest.mark.parametrize(
    ("missing", "impute", "max_age", "words"),
    [
        (["maybe"], [], [], "--missing"),
        (["nan"], [], [], "--missing"),
        (["0", "1"], [], [], "one rule"),
        (["orders:reject"], [], [], "one of the views calls, bills"),
        (["calls:reject", "calls:0"], [], [], "one for each view"),
        ([], ["minutes"], [], "--impute"),
        ([], ["minutes=inf"], [], "FEATURE=NUMBER"),
        ([], [], ["orders=1h"], "--max-age"),
        ([], [], ["soon"], "--max-age"),
    ],
)
def test_rules_that_make_no_sense_are_refused(
    missing: list[str], impute: list[str], max_age: list[str], words: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        lookup(missing, impute, max_age)

    assert words in f"{refused.value} {refused.value.faults}"


def test_the_way_back_is_typed_like_the_routes() -> None:
    typed = [
        endpoints_deploy._route("1=90"),
        endpoints_deploy._route("2=10"),
        endpoints_deploy._shadow("3=25%"),
    ]

    routes = [Route.model_validate(each) for each in endpoints_deploy._with_fallback(typed, "2")]
    added = endpoints_deploy._with_fallback([endpoints_deploy._route("1")], "4")

    assert " ".join(endpoints_deploy._typed(routes)) == "1=90 2=10 --shadow 3=25 --fallback 2"
    assert added[-1] == {"version": "4", "weight": 0, "fallback": True}


@pytest.mark.parametrize("text", ["3=0", "3=101", "3=x", "3=-1", "3=1.5"])
def test_a_shadow_has_a_share_in_percent(text: str) -> None:
    with pytest.raises(InvalidInput, match="a shadow is not valid"):
        endpoints_deploy._shadow(text)


def test_a_canary_keeps_shadows_and_the_fallback() -> None:
    shadow = ServedRoute(version="3", weight=0, shadow=20, id=ObjectId("version_3"))
    fallback = ServedRoute(version="1", weight=100, fallback=True, id=ObjectId("version_1"))

    assert canary._weighted(shadow, "3", 0) == Route(version="3", weight=0, shadow=20)
    assert canary._weighted(shadow, "3", 10) == Route(version="3", weight=10)
    assert canary._weighted(fallback, "1", 90) == Route(version="1", weight=90, fallback=True)
    assert canary._weighted(None, "4", 10) == Route(version="4", weight=10)
