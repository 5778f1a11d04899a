"""`fj.open` and `fj.connect` have the same signatures, records and errors: each call is made on both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from pydantic import BaseModel

import falaj as fj
from falaj.control.services import all_operations
from falaj.errors import FalajError
from falaj.governance.operations.caller import Caller, acting_as
from falaj.records.control.pipelines import Pipeline
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.governance.identity import Role
from falaj.records.names import PrincipalId
from falaj.records.scheduling.mig import GpuSettings
from falaj.records.serving.endpoints import Route
from falaj.records.training.jobs import JobSpec
from falaj.sdk.embedded import open_platform
from falaj.sdk.remote import remote_service
from falaj.training.code_archive import pack_code
from interfaces import create_people, serve, with_probe_known
from model_files import onnx
from platforms import TWO_ZONES, configuration
from probe import Probe

ID = re.compile(r"\b[a-z]+_[0-9a-z]{26}\b|\b[0-9a-f]{32}\b|(?<=the log has )\d+")
OWN = {"secret", "code", "root", "key", "ed25519", "signature", "log_id"}
OWN |= {"seq", "origin", "request", "token", "input", "manifest_sha256", "card_sha256"}
"""Fields whose values differ between homes or interfaces."""

PLAIN = 'permit (principal, action == Action::"blobs.read", resource);'

DRIVER = Entity(name="driver", key="driver_id")
TRIPS = FeatureView(
    name="trips", entities=("driver",), columns=(Feature(name="fare", type=ColumnType.FLOAT),)
)
SPEC = JobSpec(name="train", script="train.py", priority=-1)
LOST = SPEC.model_copy(update={"inputs": {"training": "nothing"}})
ROUTES = (Route(version="1", fallback=True),)
PIPELINE = Pipeline(
    name="weekly",
    endpoint="churn",
    model="churn",
    spine="nothing",
    window=timedelta(days=7),
    views=("nothing",),
    job=SPEC,
)
LONG_AGO = {"since": datetime(2020, 1, 1, tzinfo=UTC), "until": datetime(2020, 2, 1, tzinfo=UTC)}
PICKLE = b"\x80\x04cos\nsystem\n."


def uploaded(platform: Any) -> str:
    return str(platform.blobs.upload(iter([onnx()])).id)


def packed(platform: Any) -> str:
    with NamedTemporaryFile("w", suffix=".py", prefix="train") as script:
        code = pack_code(script.name)
    return str(platform.blobs.upload(iter([code.archive])).id)


@dataclass
class Side:
    """A platform as its administrator uses it, and a way to act as another user."""

    platform: Any
    blobs: Path
    acting: Callable[[str], AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    folder = tmp_path_factory.mktemp("near")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALAJ_CONFIG_DIR", str(folder / "config"))
        (folder / "home").mkdir()
        (folder / "home" / "falaj.toml").write_text(configuration("sqlite", TWO_ZONES))
        platform = open_platform(folder / "home")
    with platform:
        create_people(platform)
        with_probe_known(platform.workspaces.gate)
        platform.probe = Probe(platform.workspaces.gate)
        ids = {name: platform.users.show(name).id for name in ("dana", "sam")}

        def acting(name: str) -> AbstractContextManager[Any]:
            if name == "admin":
                return nullcontext()
            return acting_as(Caller(PrincipalId(ids[name]), name, "user", "test"))

        yield Side(platform, folder / "home" / "blobs", acting)


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    with serve(tmp_path_factory.mktemp("far"), toml=TWO_ZONES) as served:
        platforms = {
            "admin": served.platform,
            "dana": served.connect(served.developer),
            "sam": served.connect(served.stranger),
        }
        side = Side(None, served.parts.home.blobs, lambda name: taking(side, platforms[name]))
        for platform in platforms.values():
            platform.probe = remote_service(Probe, platform.workspaces.gate)
        yield side


def taking(side: Side, platform: Any) -> AbstractContextManager[Any]:
    side.platform = platform
    return nullcontext()


def outcome(side: Side, who: str, call: Callable[[Any], Any]) -> Any:
    """Return the result of `call` or the error that it raises, without values that must differ."""
    with side.acting(who):
        try:
            return plain(call(side.platform))
        except FalajError as error:
            return (
                type(error),
                error.code,
                plain(error.message),
                plain(error.faults),
                {name: plain(json.loads(json.dumps(value))) for name, value in error.details.items()},
                plain(str(error)),
            )


def plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        fields = {name: getattr(value, name) for name in type(value).model_fields}
        kind = type(value).__pydantic_generic_metadata__["origin"] or type(value)
        return kind, {n: n if n in OWN else plain(v) for n, v in fields.items()}
    if isinstance(value, tuple | list):
        return type(value), [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, datetime):
        return type(value), value.utcoffset()
    if isinstance(value, str):
        return (Role if isinstance(value, Role) else str), ID.sub("…", value)
    return type(value), value


def twice(call: Callable[[Any], Any], other: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    """Return the second of two calls with one idempotency key."""

    def both(platform: Any) -> Any:
        with fj.once(key=f"key-{id(call)}"):
            call(platform)
            return (other or call)(platform)

    return both


def after(*steps: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the result of the last of several calls."""
    return lambda p: [step(p) for step in steps][-1]


CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    # name: (caller, call)
    "make a workspace": ("admin", lambda p: p.workspaces.create("near-and-far")),
    "list workspaces": ("admin", lambda p: p.workspaces.list()),
    "list what dana sees": ("dana", lambda p: p.workspaces.list()),
    "page": ("admin", lambda p: p.workspaces.list(limit=1).items),
    "grant with an enum": ("admin", lambda p: p.workspaces.grant("risk", "sam", role=Role.VIEWER)),
    "grant with text": ("admin", lambda p: p.workspaces.grant("risk", "sam", role="auditor")),
    "roles": ("admin", lambda p: p.workspaces.roles("risk")),
    "who am I": ("dana", lambda p: p.users.whoami()),
    "a service": ("admin", lambda p: p.users.create("robot", kind="service")),
    "a group": (
        "admin",
        lambda p: after(lambda q: q.groups.create("g"), lambda q: q.groups.add("g", "dana"))(p),
    ),
    "a token": ("dana", lambda p: p.tokens.issue(purpose="x", actions=("blobs.*",), workspace="risk")),
    "a link": ("dana", lambda p: p.tokens.sign_in_link()),
    "a policy": ("admin", lambda p: p.policies.publish("readers", text=PLAIN, workspace="risk")),
    "a checked policy": ("sam", lambda p: p.policies.check(text=PLAIN)),
    "who can": ("admin", lambda p: p.policies.who_can("blobs.read", "workspace:risk")),
    "schema": ("sam", lambda p: p.policies.schema()),
    "events": (
        "admin",
        lambda p: after(
            lambda q: q.secrets.set("told", "x"),
            lambda q: q.events.list(types=("secrets.set",)).items[-1].name,
        )(p),
    ),
    "webhooks": ("admin", lambda p: p.webhooks.list()),
    "zones": ("sam", lambda p: p.zones.list()),
    "machines": ("sam", lambda p: p.nodes.list()),
    "nodes that autoscalers are asked for": ("admin", lambda p: p.nodes.scale_up()),
    "autoscalers are the operators'": ("sam", lambda p: p.nodes.scale_up()),
    "a cordoned node": ("admin", lambda p: p.nodes.cordon(p.nodes.list()[0].node.name).node),
    "a node that is not there": ("admin", lambda p: p.nodes.drain("gpu-9")),
    "a node that another may not drain": ("sam", lambda p: p.nodes.drain(p.nodes.list()[0].node.name)),
    "layouts of GPUs": ("admin", lambda p: p.nodes.plan_mig()),
    "GPUs of a node that is not drained": (
        "admin",
        lambda p: p.nodes.configure_gpus(
            p.nodes.list()[0].node.name, settings=GpuSettings(mig="all-disabled")
        ),
    ),
    "an uncordoned node": ("admin", lambda p: p.nodes.uncordon(p.nodes.list()[0].node.name).node),
    "a run": ("admin", lambda p: p.runs.show(p.runs.start("churn", params={"lr": "0.1"}).id).params),
    "an experiment": ("admin", lambda p: p.experiments.create("Second try", tags={"a": "b"}).tags),
    "a logged model": (
        "admin",
        lambda p: p.loggedmodels.create(p.experiments.find("Second try").id, name="m").status,
    ),
    "a filter that is wrong": ("admin", lambda p: p.runs.list(where="metrics.auc ~ 1")),
    "a view": ("admin", lambda p: p.features.apply(entities=(DRIVER,), views=(TRIPS,))),
    "rows of a view without any": ("admin", lambda p: list(p.features.scan("trips"))),
    "a model": ("admin", lambda p: p.models.register("churn", files=(uploaded(p),), paths=("model.onnx",))),
    "a pickle": (
        "admin",
        lambda p: p.models.register("churn", files=(p.put("b", PICKLE).id,), paths=("m.pkl",)),
    ),
    "versions that are found": (
        "admin",
        lambda p: p.modelversions.list(where="name = 'churn'").items[-1].number,
    ),
    "an upload in parts": (
        "admin",
        lambda p: p.uploads.start(p.runs.start("churn").id, "weights/model.onnx").path,
    ),
    "a promotion": ("admin", lambda p: p.models.promote("churn@1", to="champion")),
    "studies": ("dana", lambda p: p.studies.list()),
    "a study that is not there": ("dana", lambda p: p.studies.show("nowhere")),
    "a job without its code": ("admin", lambda p: p.jobs.submit(SPEC)),
    "a job on data that is not there": ("admin", lambda p: p.jobs.submit(LOST, code=packed(p))),
    "a job": ("admin", lambda p: p.jobs.submit(SPEC, code=packed(p)).spec),
    "a queue": ("admin", lambda p: p.queues.set("night", quota={"gpus": 2}, limit={"gpus": 4}, weight=2)),
    "a queue with too low a limit": (
        "admin",
        lambda p: p.queues.set("day", quota={"gpus": 2}, limit={"gpus": 1}),
    ),
    "queues": ("dana", lambda p: [each.settings for each in p.queues.list().items]),
    "a queue for a stranger": ("sam", lambda p: p.queues.show("nowhere")),
    "a budget": ("admin", lambda p: p.queues.set_budget("risk", gpu_hours=5, period="week")),
    "a budget of one's own": ("dana", lambda p: p.queues.set_budget("risk", gpu_hours=5)),
    "a cluster that is not there": ("admin", lambda p: p.clusters.render()),
    "namespaces for someone else": ("dana", lambda p: p.clusters.apply()),
    "usage": ("dana", lambda p: p.usage.show(by="user", **LONG_AGO)),
    "usage as a bill": ("admin", lambda p: b"".join(p.usage.export(**LONG_AGO))),
    "an endpoint": ("admin", lambda p: p.endpoints.deploy("churn", model="churn@1").routes),
    "settings of an endpoint": ("admin", lambda p: p.endpoints.configure("churn", instances=2).settings),
    "settings that do not exist": ("admin", lambda p: p.endpoints.configure("churn", instances=0)),
    "settings for a stranger": ("sam", lambda p: p.endpoints.configure("churn", instances=1)),
    "replicas": ("admin", lambda p: p.endpoints.replicas()),
    "replicas for a stranger": ("sam", lambda p: p.endpoints.replicas()),
    "a restart without a model server": ("admin", lambda p: p.endpoints.restart()),
    "sticky routes": ("admin", lambda p: p.endpoints.route("churn", routes=ROUTES, sticky="header").sticky),
    "the load of no server": ("admin", lambda p: p.endpoints.load()),
    "a shadow report": ("admin", lambda p: p.endpoints.shadow_report("churn")),
    "a sticky key of another kind": (
        "admin",
        lambda p: p.endpoints.route("churn", routes=ROUTES, sticky="cookie"),
    ),
    "an endpoint for a stranger": ("sam", lambda p: p.endpoints.show("churn")),
    "a monitor of nothing": ("admin", lambda p: p.monitoring.watch("nothing", reference="nothing")),
    "an optimization on nothing": ("admin", lambda p: p.optimization.start("churn@1", data="x", target="y")),
    "a prediction of nothing": ("admin", lambda p: p.predictions.start("churn@1", data="blob:x", name="y")),
    "a pipeline without its views": ("admin", lambda p: p.pipelines.apply(PIPELINE)),
    "pipelines": ("admin", lambda p: p.pipelines.list()),
    "an upload": ("dana", lambda p: p.blobs.upload(iter([b"a", b"bc"]), workspace="risk", classes=("pii",))),
    "put": ("admin", lambda p: p.put("put", b"bytes", workspace="risk", zone="frankfurt")),
    "get": ("admin", lambda p: p.get("risk/put")),
    "show a blob": ("admin", lambda p: p.blobs.show("risk/put")),
    "label": ("admin", lambda p: p.objects.label("risk/blob:put", only=("DE", "AE"), classes=("pii",))),
    "lineage": ("admin", lambda p: [node.kind for node in p.lineage.graph("risk/blob:put")]),
    "long work": ("admin", lambda p: p.blobs.copy("risk/put", "local", name="copied")),
    "a secret": ("admin", lambda p: p.secrets.set("password", "hunter2")),
    "secrets": ("admin", lambda p: p.secrets.list()),
    "a secret that is too long": ("admin", lambda p: p.secrets.set("password", "x" * 70_000)),
    "a secret for a stranger": ("sam", lambda p: p.secrets.use("password")),
    "keys": ("admin", lambda p: len(p.keys.list()) > 2),
    "rotate": ("admin", lambda p: p.keys.rotate().rewrapped > 2),
    "audit": ("admin", lambda p: p.audit.list(action="groups.create", workspace="platform").items),
    "verify": ("admin", lambda p: p.verify_audit().ok),
    "public key": ("sam", lambda p: p.audit.key()),
    "status": ("sam", lambda p: p.platform.status().model_copy(update={"controller": None})),
    "the first answer again": ("admin", twice(lambda p: p.workspaces.create("only-once"))),
    # errors
    "no such workspace": ("admin", lambda p: p.workspaces.show("nowhere")),
    "hidden from dana": ("dana", lambda p: p.workspaces.show("default")),
    "no such blob": ("admin", lambda p: p.blobs.read("nowhere")),
    "no such work": ("admin", lambda p: p.workflows.watch("nowhere")),
    "no such entry": ("admin", lambda p: p.audit.inclusion_proof(2**40).index),
    "a bad name": ("admin", lambda p: p.workspaces.create("../etc")),
    "several faults": ("admin", lambda p: p.workspaces.list(after=5, limit="many")),
    "too few arguments": ("admin", lambda p: p.workspaces.create()),
    "too many arguments": ("admin", lambda p: p.workspaces.create("a", "b")),
    "an unknown argument": ("admin", lambda p: p.workspaces.create("a", color="red")),
    "no such zone": ("admin", lambda p: p.blobs.upload(iter([b"x"]), zone="moon")),
    "a reference without a kind": ("admin", lambda p: p.objects.show("put")),
    "a policy that does not parse": ("admin", lambda p: p.policies.check(text="permit everything")),
    "a policy beside the schema": (
        "admin",
        lambda p: p.policies.publish("x", text=PLAIN.replace("read", "fly")),
    ),
    "the name is taken": ("admin", lambda p: p.workspaces.create("risk")),
    "another kind has the name": ("admin", lambda p: p.users.create("dana", kind="service")),
    "a role not held": ("admin", lambda p: p.workspaces.revoke("risk", "dana", role="admin")),
    "disable oneself": ("admin", lambda p: p.users.disable(p.users.whoami().principal.name)),
    "committed already": ("admin", lambda p: p.blobs.commit("risk/put", name="again")),
    "destroy the platform's key": ("admin", lambda p: p.keys.destroy("platform")),
    "a key with another input": (
        "admin",
        twice(lambda p: p.workspaces.create("k1"), lambda p: p.workspaces.create("k2")),
    ),
    "not allowed": ("dana", lambda p: p.workspaces.create("mine")),
    "not an auditor": ("dana", lambda p: p.audit.export()),
    "not in that place": ("admin", lambda p: p.blobs.upload(iter([b"x"]), only=("DE",), zone="local")),
    "not to that place": (
        "admin",
        after(
            lambda p: p.put("kept", b"x", only=("AE",)),
            lambda p: p.zones.check("blob:kept", "frankfurt"),
        ),
    ),
    "keys are gone": (
        "admin",
        after(
            lambda p: p.workspaces.create("doomed"),
            lambda p: p.keys.destroy("doomed"),
            lambda p: p.blobs.upload(iter([b"x"]), workspace="doomed"),
        ),
    ),
    "a crash": ("sam", lambda p: p.probe.crash()),
} | {f"raises {code}": ("sam", lambda p, code=code: p.probe.fail(code)) for code in sorted(FalajError.types)}


@pytest.mark.parametrize("what", CALLS)
def test_a_call_has_the_same_outcome(near: Side, far: Side, what: str) -> None:
    who, call = CALLS[what]

    assert outcome(near, who, call) == outcome(far, who, call)


def test_the_calls_cover_every_service() -> None:
    source = Path(__file__).read_text()

    assert [
        service for service in {op.group for op in all_operations().values()} if f".{service}." not in source
    ] == []


def test_damaged_bytes_are_reported_on_both_interfaces(near: Side, far: Side) -> None:
    found = []
    for side in (near, far):
        with side.acting("admin"):
            side.platform.put("spoiled", b"these bytes will be changed")
            newest = max(
                (p for p in side.blobs.rglob("*") if p.is_file()), key=lambda p: p.stat().st_mtime_ns
            )
            stored = bytearray(newest.read_bytes())
            stored[-1] ^= 1
            newest.write_bytes(stored)

        found.append(outcome(side, "admin", lambda p: p.get("spoiled")))

    assert found[0] == found[1]
    assert found[0][1] == "data.damaged"


def test_bytes_that_no_zone_may_hold_are_refused_on_both_interfaces(near: Side, far: Side) -> None:
    found = [outcome(side, "admin", lambda p: p.blobs.upload(iter([b"x"]), only=())) for side in (near, far)]

    assert found[0] == found[1]


def test_services_are_of_the_same_type(near: Side, far: Side) -> None:
    for op in all_operations().values():
        near_service, far_service = getattr(near.platform, op.group), getattr(far.platform, op.group)

        assert type(near_service) is type(far_service)
        assert callable(getattr(far_service, op.verb))
