"""Objects are found by a part of their name or by their id, by those who may see them."""

from __future__ import annotations

import pytest

from falaj.errors import InvalidInput
from falaj.governance.catalog import service
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from platforms import OwnPlatform


def names(platform: OwnPlatform, text: str, **options: int) -> list[str]:
    return [found.name for found in platform.objects.search(text, **options)]


def test_objects_are_found_by_a_part_of_their_name_the_newest_first(platform: OwnPlatform) -> None:
    for name in ("churn-2025", "weather", "Churn-2026"):
        platform.experiments.create(name)

    assert names(platform, "churn") == ["Churn-2026", "churn-2025"]
    assert names(platform, "CHURN-2025") == ["churn-2025"]
    assert names(platform, "churn", limit=1) == ["Churn-2026"]


def test_objects_are_found_by_the_beginning_of_their_id(platform: OwnPlatform) -> None:
    made = platform.experiments.create("churn")

    assert [found.id for found in platform.objects.search(made.id[:-2])] == [made.id]


@pytest.mark.parametrize("text", ["%", "_", "\\", "'", "zzz"])
def test_the_text_is_no_pattern(platform: OwnPlatform, text: str) -> None:
    platform.secrets.set("pin", "x")

    assert names(platform, text) == []


def test_what_a_caller_may_not_see_is_not_found(
    platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "SEARCHED", 2)
    for number in range(7):
        platform.secrets.set(f"hidden-{number}", "x")
        platform.secrets.set(f"shown-{number}", "x")
    dana = platform.join("dana", Role.VIEWER)
    text = (
        f'forbid (principal == User::"{dana.id}", action, resource) when {{ resource.name like "hidden*" }};'
    )
    platform.policies.publish("hide", text=text)

    with acting_as(dana):
        found = names(platform, "n-", limit=5)

    assert found == [f"shown-{number}" for number in (6, 5, 4, 3, 2)]


def test_an_empty_text_is_refused(light_platform: OwnPlatform) -> None:
    with pytest.raises(InvalidInput):
        light_platform.objects.search("")
