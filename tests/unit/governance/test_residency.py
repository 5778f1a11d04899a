"""Labels flow along lineage and only get stricter; data forbidden in a zone is refused before a byte is stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from falaj.errors import InvalidInput, ResidencyDenied
from falaj.governance.operations.caller import acting_as
from falaj.governance.tables import blobs, events, lineage_edges, objects
from falaj.records.governance.blobs import Blob
from falaj.records.governance.identity import Role
from falaj.records.governance.residency import Label
from platforms import OwnPlatform, make_platform

AE_ONLY = frozenset({"AE"})
NOWHERE: frozenset[str] = frozenset()


def derive(platform: OwnPlatform, name: str, *sources: str, zone: str | None = None, **own: object) -> Blob:
    refs = tuple(f"blob:{source}" for source in sources)
    return platform.put(name, name.encode(), sources=refs, zone=zone, **own)


def label_of(platform: OwnPlatform, name: str) -> Label:
    return platform.objects.show(f"blob:{name}").label


# ------------------------------------------------------------------------------------------------- flow


def test_labels_flow_and_join_over_several_steps(platform: OwnPlatform) -> None:
    derive(platform, "patients", only=("AE", "SA"), classes=("health",))
    derive(platform, "visits", only=("AE", "DE"), classes=("pii",))
    derive(platform, "cleaned", "patients")
    derive(platform, "joined", "cleaned", "visits")

    model = derive(platform, "model", "joined")

    assert model.label == Label(only=AE_ONLY, classes=frozenset({"health", "pii"}))
    assert label_of(platform, "cleaned") == Label(only={"AE", "SA"}, classes={"health"})
    assert platform.objects.show("blob:model").own_label == Label()


def test_inputs_without_a_common_zone_are_refused_everywhere(light_platform: OwnPlatform) -> None:
    derive(light_platform, "ours", only=("AE",))
    derive(light_platform, "theirs", zone="frankfurt", only=("DE",))

    for zone in ("local", "frankfurt"):
        with pytest.raises(ResidencyDenied):
            derive(light_platform, "both", "ours", "theirs", zone=zone)


def test_a_later_label_applies_downstream_and_names_misplaced_objects(platform: OwnPlatform) -> None:
    derive(platform, "source")
    derive(platform, "copy", "source", zone="frankfurt")
    derive(platform, "model", "copy")
    derive(platform, "unrelated", zone="frankfurt")

    changed = platform.objects.label("blob:source", only=("AE",), classes=("pii",))

    assert changed.reached == 2
    assert [found.name for found in changed.misplaced] == ["copy"]
    assert label_of(platform, "model") == Label(only=AE_ONLY, classes={"pii"})
    assert label_of(platform, "unrelated") == Label()


def test_a_label_only_adds(light_platform: OwnPlatform) -> None:
    derive(light_platform, "data", only=("AE", "DE"))

    light_platform.objects.label("blob:data", only=("AE", "SA"), classes=("pii",))
    changed = light_platform.objects.label("blob:data", classes=("health",))

    assert changed.object.label == Label(only=AE_ONLY, classes={"pii", "health"})


def test_a_label_that_forbids_the_present_zone_reports_the_object(light_platform: OwnPlatform) -> None:
    derive(light_platform, "data")

    changed = light_platform.objects.label("blob:data", only=("DE",))

    assert [found.name for found in changed.misplaced] == ["data"]


def test_unlabel_lifts_the_own_label_and_leaves_the_inherited_one(platform: OwnPlatform) -> None:
    derive(platform, "source", only=("AE",), classes=("pii",))
    derive(platform, "middle", "source", classes=("health",))
    derive(platform, "end", "middle")

    platform.objects.unlabel("blob:middle")
    middle, end = label_of(platform, "middle"), label_of(platform, "end")
    platform.objects.unlabel("blob:source")

    assert middle == end == Label(only=AE_ONLY, classes={"pii"})
    assert label_of(platform, "end") == Label()


def test_a_deleted_source_still_restricts_what_came_from_it(light_platform: OwnPlatform) -> None:
    derive(light_platform, "source", only=("AE",))
    derive(light_platform, "model", "source")
    light_platform.blobs.delete("source")

    with pytest.raises(ResidencyDenied) as refused:
        derive(light_platform, "copy", "model", zone="frankfurt")

    light_platform.objects.label("blob:model", classes=("pii",))
    assert label_of(light_platform, "model").only == AE_ONLY
    assert refused.value.details["path"] == ["blob:source", "blob:model"]


# --------------------------------------------------------------------------------------------- workspace


def test_the_label_of_a_workspace_is_on_everything_in_it(platform: OwnPlatform) -> None:
    derive(platform, "before", zone="frankfurt")

    changed = platform.objects.label("workspace:default", only=("AE",))
    after = derive(platform, "after")

    assert [found.name for found in changed.misplaced] == ["before"]
    assert (label_of(platform, "before").only, after.label.only) == (AE_ONLY, AE_ONLY)
    with pytest.raises(ResidencyDenied) as refused:
        derive(platform, "later", zone="frankfurt")
    assert refused.value.details["path"] == ["workspace:default"]


def test_the_label_of_a_workspace_goes_with_data_that_leaves_it(light_platform: OwnPlatform) -> None:
    light_platform.workspaces.create("other")
    derive(light_platform, "data")
    light_platform.objects.label("workspace:default", only=("AE",))

    with pytest.raises(ResidencyDenied) as refused:
        derive(light_platform, "copy", "data", workspace="other", zone="frankfurt")

    assert refused.value.details["path"] == ["workspace:default", "blob:data"]


def test_unlabelling_a_workspace_lifts_its_label_from_everything_in_it(light_platform: OwnPlatform) -> None:
    derive(light_platform, "data", classes=("pii",))
    light_platform.objects.label("workspace:default", only=("AE",))

    light_platform.objects.unlabel("workspace:default")

    assert label_of(light_platform, "data") == Label(classes={"pii"})


# ----------------------------------------------------------------------------------------------- refusal


def test_an_upload_to_a_forbidden_zone_is_refused_with_its_path_and_stores_nothing(
    platform: OwnPlatform,
) -> None:
    derive(platform, "patients", only=("AE",), classes=("health",))
    derive(platform, "model", "patients")
    tables = (objects, blobs, lineage_edges, events)
    before = [platform.count(table) for table in tables]

    with pytest.raises(ResidencyDenied) as refused:
        platform.blobs.upload(must_not_be_read(), sources=("blob:model",), zone="frankfurt")

    (fault,) = refused.value.faults
    assert refused.value.details == {"path": ["blob:patients", "blob:model"], "zone": "frankfurt"}
    assert fault.where == "blob:patients → blob:model"
    assert fault.allowed == "blob:patients is labelled only AE; health"
    assert fault.fix == "choose a zone in AE"
    assert stored_files(platform, "frankfurt") == []
    assert [platform.count(table) for table in tables] == before
    assert platform.entries()[-1]["outcome"] == "denied"


def test_bytes_are_not_stored_against_their_own_label(light_platform: OwnPlatform) -> None:
    before = light_platform.count(objects)

    with pytest.raises(ResidencyDenied, match="only AE"):
        light_platform.blobs.upload(must_not_be_read(), only=("AE",), zone="frankfurt")

    assert (stored_files(light_platform, "frankfurt"), light_platform.count(objects)) == ([], before)


def test_a_copy_to_a_forbidden_zone_is_refused_at_the_request(light_platform: OwnPlatform) -> None:
    derive(light_platform, "patients", only=("AE",))

    with pytest.raises(ResidencyDenied):
        light_platform.blobs.copy("patients", "frankfurt", name="copy")

    assert light_platform.workflows.list().items == ()


def test_zone_check_answers_without_storing(light_platform: OwnPlatform) -> None:
    derive(light_platform, "patients", only=("AE",))
    derive(light_platform, "model", "patients")

    assert light_platform.zones.check("blob:model", "local").jurisdiction == "AE"
    with pytest.raises(ResidencyDenied) as refused:
        light_platform.zones.check("blob:model", "frankfurt")
    assert refused.value.details["path"] == ["blob:patients", "blob:model"]


def test_an_unknown_zone_is_refused_with_the_known_ones(light_platform: OwnPlatform) -> None:
    with pytest.raises(InvalidInput) as refused:
        light_platform.blobs.upload(must_not_be_read(), zone="atlantis")

    assert refused.value.faults[0].allowed == "local, frankfurt"


def test_without_configuration_bytes_are_stored_in_the_emirates(tmp_path: Path) -> None:
    with make_platform(tmp_path) as platform:
        blob = platform.put("data", b"bytes")
        zones = [(zone.name, zone.jurisdiction, zone.default) for zone in platform.zones.list()]

    assert (blob.zone, zones) == ("local", [("local", "AE", True)])


def test_a_refusal_does_not_name_objects_hidden_from_its_reader(light_platform: OwnPlatform) -> None:
    light_platform.workspaces.create("secret")
    light_platform.put("plans", b"x", workspace="secret", only=("AE",))
    light_platform.put("summary", b"x", sources=("secret/blob:plans",))
    dana = light_platform.join("dana", Role.DEVELOPER)

    with acting_as(dana), pytest.raises(ResidencyDenied) as refused:
        light_platform.zones.check("blob:summary", "frankfurt")

    assert "plans" not in f"{refused.value} {refused.value.details}"


def test_a_label_does_not_name_objects_hidden_from_its_reader(light_platform: OwnPlatform) -> None:
    light_platform.workspaces.create("secret")
    light_platform.put("data", b"x")
    light_platform.put("plans", b"x", workspace="secret", sources=("blob:data",), zone="frankfurt")
    dana = light_platform.join("dana", Role.DEVELOPER)

    with acting_as(dana):
        changed = light_platform.objects.label("blob:data", only=("AE",))

    assert changed.reached == 1
    assert "plans" not in changed.model_dump_json()


def must_not_be_read():
    raise AssertionError("the bytes were read")
    yield b""


def stored_files(platform: OwnPlatform, zone: str) -> list[Path]:
    return [
        path
        for path in (platform.home.blobs / zone).rglob("*")
        if path.is_file() and ".store." not in path.name
    ]
