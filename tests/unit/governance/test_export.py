"""Data that a label restricts is handed out only to where it may lie, runs only there, and lies there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from falaj.control.services import all_operations
from falaj.errors import ConfigInvalid, Conflict, FalajError, ResidencyDenied
from falaj.governance.objects import resolve
from falaj.governance.operations.caller import Caller, acting_as
from falaj.governance.residency.zones import ZoneRegistry
from falaj.records.config import Config
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.governance.identity import Role
from falaj.records.governance.residency import UNKNOWN, Zone
from falaj.records.training.jobs import JobSpec
from falaj.sdk.definition_files.features import read_definitions
from falaj.serving.validation import require_still_servable
from interfaces import serve
from model_servers import constant
from platforms import OwnPlatform, make_platform

NETWORKS = """
[zones.local]
jurisdiction = "AE"
default = true
networks = ["10.1.0.0/16", "fd00:1::/32"]

[zones.frankfurt]
jurisdiction = "DE"
networks = ["10.2.0.0/16", "10.1.7.0/24"]

[node]
zone = "local"
"""
VIEW = FeatureView(
    name="facts",
    entities=("customer",),
    event_time="at",
    columns=(Feature(name="spend", type=ColumnType.FLOAT),),
    only=("AE",),
)


@pytest.fixture
def platform(tmp_path: Path) -> Any:
    with make_platform(tmp_path, toml=NETWORKS) as made:
        fill(made, VIEW)
        yield made


def rows(platform: OwnPlatform, name: str = "rows") -> str:
    table = pa.table(
        {
            "customer": ["a"],
            "at": pa.array([0], pa.timestamp("us", "UTC")),
            "spend": [1.5],
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return str(platform.put(name, sink.getvalue().to_pybytes()).id)


def fill(platform: OwnPlatform, view: FeatureView, **where: Any) -> None:
    platform.features.apply(entities=(Entity(name="customer", key="customer"),), views=(view,), **where)
    platform.features.ingest("facts", data=rows(platform))
    platform.features.materialize("facts")
    platform.put("secret", b"bytes", only=("AE",))
    platform.put("open", b"bytes")


def at(platform: OwnPlatform, origin: str) -> Caller:
    """An administrator who calls from somewhere."""
    known = {user.name for user in platform.users.list().items}
    if "sara" not in known:
        platform.join("sara", Role.ADMIN)
    person = next(user for user in platform.users.list().items if user.name == "sara")
    return Caller(person.id, "sara", "user", origin)


READS: dict[str, Callable[[OwnPlatform], Any]] = {
    "blobs.read": lambda platform: b"".join(platform.blobs.read("secret")),
    "features.scan": lambda platform: platform.features.scan("facts").read_all(),
    "features.read": lambda platform: platform.features.read("facts", keys=("a",)),
    "features.load": lambda platform: platform.features.load("churn").read_all(),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("remote:10.1.0.9", True),
        ("remote:fd00:1::9", True),
        ("remote:::ffff:10.1.0.9", True),
        ("remote:127.0.0.1", True),
        ("local", True),
        ("remote:10.2.0.9", False),
        ("remote:10.1.7.9", False),  # the narrower network decides
        ("remote:192.0.2.1", False),
        ("remote:nonsense", False),
        ("remote", False),
    ],
)
def test_what_is_restricted_goes_only_to_where_it_may_lie(
    platform: OwnPlatform, origin: str, allowed: bool
) -> None:
    platform.features.training_set("churn", spine="view:facts", views=("facts",))
    with acting_as(at(platform, origin)):
        for read in READS.values():
            if allowed:
                assert read(platform)
            else:
                with pytest.raises(ResidencyDenied, match="may not be downloaded to where you are"):
                    read(platform)

    denied = [entry for entry in platform.entries() if entry["outcome"] == "denied"]
    assert [entry["action"] for entry in denied] == ([] if allowed else [*READS])


@pytest.mark.slow
def test_what_is_not_restricted_goes_anywhere(platform: OwnPlatform) -> None:
    with acting_as(at(platform, "remote:192.0.2.1")):
        assert platform.get("open") == b"bytes"


@pytest.mark.slow
def test_one_token_at_two_places_is_asked_at_each(platform: OwnPlatform) -> None:
    near, far = at(platform, "remote:10.1.0.9"), at(platform, "remote:192.0.2.1")
    with acting_as(near):
        platform.features.read("facts", keys=("a",))

    with acting_as(replace(far)), pytest.raises(ResidencyDenied):
        platform.features.read("facts", keys=("a",))


@pytest.mark.slow
def test_without_networks_downloads_are_as_before(light_platform: OwnPlatform) -> None:
    fill(light_platform, VIEW)

    with acting_as(at(light_platform, "remote:192.0.2.1")):
        assert light_platform.get("secret") == b"bytes"


@pytest.mark.slow
def test_a_download_over_http_is_asked(tmp_path: Path) -> None:
    away = NETWORKS.replace(
        'zone = "local"', 'zone = "frankfurt"'
    )  # a caller on loopback is where the server is
    with serve(tmp_path, toml=away) as served:
        served.platform.put("secret", b"bytes", only=("AE",))
        served.platform.put("open", b"bytes")

        assert served.platform.get("open") == b"bytes"
        with pytest.raises(ResidencyDenied, match="may not be downloaded"):
            served.platform.get("secret")
        answer = served.as_admin.get("/api/v1/blobs/read", params={"blob": "secret"})
        assert answer.status_code == 403


def test_every_operation_that_streams_data_is_asked() -> None:
    asked = {name for name, op in all_operations().items() if op.hands_out}

    assert {
        "blobs.read",
        "endpoints.prediction",
        "features.load",
        "features.quarantined_rows",
        "features.read",
        "features.scan",
        "jobs.logs",
        "models.export",
        "models.read",
        "runs.metrics",
    } <= asked


# -------------------------------------------------------------------------------- where a machine is


SEVERAL = NETWORKS.replace('[node]\nzone = "local"\n', "").replace("networks", "# networks")


def test_a_machine_that_names_none_of_several_zones_claims_none(tmp_path: Path) -> None:
    with make_platform(tmp_path, toml=SEVERAL) as platform:
        (machine,) = platform.nodes.list()

    assert (machine.node.zone, machine.node.jurisdiction) == ("unknown", "ZZ")


def test_the_machine_of_a_single_zone_is_in_it(tmp_path: Path) -> None:
    with make_platform(tmp_path) as platform:
        (machine,) = platform.nodes.list()

    assert (machine.node.zone, machine.node.jurisdiction) == ("local", "AE")


def test_a_job_on_restricted_data_does_not_run_on_a_machine_that_names_no_zone(tmp_path: Path) -> None:
    with make_platform(tmp_path, toml=SEVERAL) as platform:
        platform.put("secret", b"bytes", only=("AE",))
        platform.put("open", b"bytes")
        spec = {"name": "fit", "module": "falaj.optimization.runs"}

        with pytest.raises(ResidencyDenied):
            platform.jobs.submit(JobSpec(**spec, inputs={"data": "secret"}))
        assert platform.jobs.submit(JobSpec(**spec, inputs={"data": "open"})).id


@pytest.mark.slow
@pytest.mark.parametrize(("toml", "is_served"), [(SEVERAL, False), (NETWORKS, True)])
def test_a_restricted_model_is_served_only_where_the_machine_may_have_it(
    tmp_path: Path, toml: str, is_served: bool
) -> None:
    with make_platform(tmp_path, toml=toml) as platform:
        blob = platform.put("model", constant(tmp_path / "m.onnx", 1.0).read_bytes(), only=("AE",))
        platform.models.register("m", files=(blob.id,), paths=("model.onnx",))
        served = platform.endpoints.deploy("m", model="m@1")
        with platform.database.read() as tx:
            version = resolve(tx, "m@1", kind="model_version", workspace="default")
            check = partial(require_still_servable, platform.parts.gate, tx, version, served)

            if is_served:
                check()
            else:
                with pytest.raises(ResidencyDenied, match=r"node\.zone"):
                    check()


@pytest.mark.parametrize(
    "toml",
    [
        '[node]\nzone = "mars"',
        '[zones.unknown]\njurisdiction = "AE"',
        '[zones.a]\njurisdiction = "ZZ"',
        NETWORKS.replace("10.2.0.0/16", "10.1.0.0/16"),
        '[zones.a]\njurisdiction = "AE"\nnetworks = ["10.0.0.1/8"]',
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(tmp_path: Path, toml: str) -> None:
    with pytest.raises(ConfigInvalid):
        make_platform(tmp_path, toml=toml)


def test_a_restriction_to_nowhere_permits_nothing() -> None:
    registry = ZoneRegistry([Zone(name="a", jurisdiction="AE"), Zone(name="b", jurisdiction="DE")])

    assert registry.here == UNKNOWN
    assert registry.machine("unknown") == UNKNOWN


# ------------------------------------------------------------------------- tables lie in the store of their zone


def in_folder(path: Path) -> str:
    return NETWORKS + f'\n[zones.frankfurt.blobs]\npath = "{path}"\n'


@pytest.mark.slow
def test_rows_of_a_zone_lie_in_its_folder(tmp_path: Path) -> None:
    frankfurt = tmp_path / "frankfurt"
    view = VIEW.model_copy(update={"only": None})
    toml = in_folder(frankfurt)
    with make_platform(tmp_path, toml=toml) as platform:
        platform.features.apply(
            entities=(Entity(name="customer", key="customer"),), views=(view,), zone="frankfurt"
        )
        platform.features.ingest("facts", data=rows(platform))
        platform.features.materialize("facts")
        platform.features.training_set("churn", spine="view:facts", views=("facts",), zone="frankfurt")

        assert platform.features.read("facts", keys=("a",))
    assert list((frankfurt / "tables").rglob("*.parquet"))
    assert (frankfurt / "online" / "frankfurt").exists()
    assert not list(platform.home.path.rglob("*.parquet"))
    assert not (platform.home.path / "online" / "frankfurt").exists()


@pytest.mark.slow
def test_rows_from_before_a_zone_had_a_folder_are_still_read_in_the_home(tmp_path: Path) -> None:
    with make_platform(tmp_path, toml=NETWORKS) as platform:
        platform.features.apply(
            entities=(Entity(name="customer", key="customer"),),
            views=(VIEW.model_copy(update={"only": None}),),
            zone="frankfurt",
        )
        platform.features.ingest("facts", data=rows(platform))

    with make_platform(tmp_path, toml=in_folder(tmp_path / "frankfurt")) as later:
        assert later.features.scan("facts").read_all().num_rows == 1


def test_rows_of_a_bucket_elsewhere_are_not_written_here(tmp_path: Path) -> None:
    bucket = 'blobs = {driver = "s3", bucket = "b", endpoint = "http://127.0.0.1:1"}\n'
    toml = NETWORKS.replace('jurisdiction = "DE"\n', f'jurisdiction = "DE"\n{bucket}')
    with make_platform(tmp_path, toml=toml) as platform:
        view = VIEW.model_copy(update={"only": None})
        platform.features.apply(
            entities=(Entity(name="customer", key="customer"),), views=(view,), zone="frankfurt"
        )

        with pytest.raises(FalajError) as refused:
            platform.features.ingest("facts", data=rows(platform))

    assert "zones.frankfurt.tables" in str(refused.value)
    assert not list(platform.home.path.rglob("*.parquet"))


def test_config_of_networks_is_shown() -> None:
    config = Config.model_validate({"zones": {"a": {"jurisdiction": "AE", "networks": ["10.0.0.0/8"]}}})

    assert config.machine_zone == "a"


# ------------------------------------------------------------------------------------------ labels of columns


def labelled(**label: Any) -> FeatureView:
    spend = Feature(name="spend", type=ColumnType.FLOAT, **label)
    return VIEW.model_copy(update={"only": None, "columns": (spend,)})


@pytest.mark.slow
def test_the_label_of_a_column_goes_with_its_view_and_what_comes_from_it(light_platform: OwnPlatform) -> None:
    fill(light_platform, labelled(only=("AE",), classes=("personal",)))

    made = light_platform.features.training_set("churn", spine="view:facts", views=("facts",))

    assert (made.label.only, made.label.classes) == (frozenset({"AE"}), frozenset({"personal"}))
    with pytest.raises(ResidencyDenied):
        light_platform.features.training_set("away", spine="view:facts", views=("facts",), zone="frankfurt")


def test_a_view_with_a_labelled_column_does_not_lie_elsewhere(light_platform: OwnPlatform) -> None:
    with pytest.raises(ResidencyDenied):
        fill(light_platform, labelled(only=("AE",)), zone="frankfurt")


@pytest.mark.slow
def test_a_labelled_column_is_added_once_the_view_has_the_label(light_platform: OwnPlatform) -> None:
    fill(light_platform, labelled())
    later = labelled(classes=("personal",))
    with pytest.raises(Conflict, match=r"objects\.label"):
        light_platform.features.apply(views=(later,))

    light_platform.objects.label("view:facts", classes=("personal",))

    assert light_platform.features.apply(views=(later,)).views[0].version == 2
    with pytest.raises(Conflict):
        light_platform.features.apply(views=(labelled(),))


def test_a_definition_file_labels_columns(tmp_path: Path) -> None:
    file = tmp_path / "features.toml"
    file.write_text(
        '[[entity]]\nname = "customer"\nkey = "customer"\n'
        '[[view]]\nname = "facts"\nentities = ["customer"]\n'
        'columns = {spend = {type = "float", only = ["AE"], classes = ["personal"]}, visits = "integer"}\n'
    )

    (view,) = read_definitions(file).views

    assert view.own_label.only == frozenset({"AE"})
