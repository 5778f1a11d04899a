"""Policies from files of the home, and full pages of lists with hidden objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from falaj.errors import Denied, FalajError
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from platforms import TWO_ZONES, OwnPlatform, make_platform

NO_READING = """@id("why") forbid (principal, action == Action::"blobs.read", resource)
when { principal.name == "dana" };"""


def test_policies_come_from_files(tmp_path: Path) -> None:
    write_policy(tmp_path, NO_READING)

    with make_platform(tmp_path, toml=f'policies = ["policies/*.cedar"]\n{TWO_ZONES}') as platform:
        platform.put("data", b"bytes")
        dana = platform.join("dana", Role.DEVELOPER)
        with acting_as(dana), pytest.raises(Denied) as denied:
            platform.get("data")

    assert denied.value.details["rule"] == "file:limits.cedar#why"


@pytest.mark.parametrize("pattern", ["policies/limits.cedar", "policies/missing.cedar"])
def test_a_policy_file_that_is_wrong_or_missing_stops_the_start(tmp_path: Path, pattern: str) -> None:
    write_policy(tmp_path, "permit (")

    with pytest.raises(FalajError, match=r"limits\.cedar|missing\.cedar"):
        make_platform(tmp_path, toml=f'policies = ["{pattern}"]').close()


@pytest.mark.slow
def test_pages_are_full_although_most_objects_are_hidden(platform: OwnPlatform) -> None:
    dana = platform.join("dana", Role.VIEWER)
    names = [f"{'seen' if number % 4 == 3 else 'hidden'}-{number:02}" for number in range(24)]
    for name in names:
        platform.put(name, b"bytes")
    scope = f'principal == User::"{dana.id}", action == Action::"objects.show", resource is Blob'
    platform.policies.publish("hide", text=f'forbid ({scope}) when {{ resource.name like "hidden-*" }};')

    pages, after = [], ""
    with acting_as(dana):
        while after is not None:
            page = platform.blobs.list(after=after, limit=2)
            pages.append([blob.name for blob in page.items])
            after = page.next

    assert pages == [["seen-03", "seen-07"], ["seen-11", "seen-15"], ["seen-19", "seen-23"]]
    assert len(platform.blobs.list().items) == 24


def write_policy(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "home" / "policies"
    folder.mkdir(parents=True)
    (folder / "limits.cedar").write_text(text)
