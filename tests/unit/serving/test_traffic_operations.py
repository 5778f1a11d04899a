"""Operations on traffic: sticky routes, shadows with their reports and logs, and fallbacks of a platform."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from falaj.apps.cli.commands.endpoints_top import lines, rates_between
from falaj.errors import InvalidInput, Unavailable
from falaj.governance.operations.caller import Caller as Identity
from falaj.governance.operations.caller import acting_as
from falaj.records.names import ObjectId, PrincipalId
from falaj.records.registry import TensorSpec
from falaj.records.serving.endpoints import Route, ScoringRule
from falaj.records.serving.predictions import GroundTruth
from falaj.records.serving.shadows import ShadowCounts
from falaj.records.serving.statistics import ReplicaUsage, ServerLoad, VersionLoad
from falaj.serving.service import MODEL_SERVER
from model_servers import constant, serving_platform
from platforms import TWO_ZONES, OwnPlatform, make_platform
from polling import eventually

X = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [0.5, 2.0]}
TOML = TWO_ZONES + "\n[serving]\nlog_every = 0.1\n"


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnPlatform]:
    """A platform with the model m, whose versions 1 to 3 return their number."""
    folder = tmp_path_factory.mktemp("platform")
    with make_platform(folder, toml=TOML) as made:
        for number in (1, 2, 3):
            content = constant(folder / f"{number}.onnx", number).read_bytes()
            blob = made.blobs.upload(iter([content]))
            spec = TensorSpec(name="x", dtype="float32", shape=(-1, 2))
            made.models.register("m", files=(blob.id,), paths=("model.onnx",), inputs=(spec,))
        yield made


@pytest.fixture(scope="module")
def client(platform: OwnPlatform) -> Iterator[httpx.Client]:
    with serving_platform(platform.parts) as url:
        token = platform.tokens.issue(purpose="test").secret
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}) as made:
            yield made


def ask(client: httpx.Client, name: str, **headers: str) -> dict[str, Any] | None:
    answer = client.post(f"/v2/models/{name}/infer", json={"inputs": [X]}, headers=headers)
    return answer.json() if answer.status_code == 200 else None


SHADED = (Route(version="1"), Route(version="3", weight=0, shadow=100))


def test_sticky_routes_shadows_and_fallback_are_kept_and_changed(platform: OwnPlatform) -> None:
    platform.endpoints.deploy("kept", model="m@1")

    routes = (Route(version="1", weight=60), Route(version="2", weight=40, fallback=True), SHADED[1])
    made = platform.endpoints.route("kept", routes=routes, sticky="input:customer")
    again = platform.endpoints.route("kept", routes=(Route(version="1"),))

    shown = [(r.version, r.weight, r.shadow, r.fallback) for r in made.routes]
    assert shown == [("1", 60, 0, False), ("2", 40, 0, True), ("3", 0, 100, False)]
    assert (made.sticky, again.sticky) == ("input:customer", "input:customer")
    assert again.previous == routes
    assert platform.endpoints.route("kept", routes=again.previous, sticky="request").sticky == "request"


@pytest.mark.parametrize(
    ("routes", "more", "words"),
    [
        ([{"version": "1", "shadow": 10}], {}, "a shadow never answers"),
        ([{"version": "1", "weight": 0, "shadow": 10}], {}, "at least one above 0"),
        (
            [{"version": "1", "fallback": True}, {"version": "2", "fallback": True}],
            {},
            "one fallback",
        ),
        ([{"version": "1", "weight": 0, "shadow": 101}], {}, "100"),
        ([{"version": "1"}], {"sticky": "cookie:x"}, "parameter:NAME"),
        ([{"version": "1"}], {"sticky": "input:" + "x" * 300}, "sticky"),
    ],
)
def test_routes_that_contradict_themselves_are_refused(
    platform: OwnPlatform, routes: Any, more: Any, words: str
) -> None:
    platform.endpoints.deploy("refusing", model="m@1")

    with pytest.raises(InvalidInput) as refused:
        platform.endpoints.route("refusing", routes=routes, **more)

    assert words in f"{refused.value} {refused.value.faults}"


def test_a_shadow_is_reported_and_logged_apart_from_answers(
    platform: OwnPlatform, client: httpx.Client
) -> None:
    platform.endpoints.deploy("shaded", model="m@1", scoring=ScoringRule.SQUARED_ERROR)
    platform.endpoints.route("shaded", routes=SHADED)

    def reported() -> Any:
        ask(client, "shaded")
        found = platform.endpoints.shadow_report("shaded")
        return found if found.differences else None

    report = eventually(reported)

    (difference,) = report.differences
    (output,) = difference.outputs
    assert (difference.version, difference.against, difference.errors) == ("3", "1", 0)
    assert (output.mean_difference, output.max_difference) == (2.0, 2.0)
    assert difference.p99_ms is not None
    assert difference.against_p99_ms is not None
    assert {each.version for each in platform.endpoints.stats("shaded").versions} <= {"1"}


def test_labels_of_a_shadow_do_not_count_for_its_version(platform: OwnPlatform, client: httpx.Client) -> None:
    platform.endpoints.deploy("labelled", model="m@1", scoring=ScoringRule.SQUARED_ERROR)
    platform.endpoints.route("labelled", routes=SHADED)
    eventually(lambda: ask(client, "labelled"))

    def logged() -> Any:
        ask(client, "labelled")
        with platform.parts.database.read() as tx:
            rows = tx.execute_sql("SELECT id, version FROM serving_batches ORDER BY id")
        owned = [row[0] for row in rows if row[1] == "3"]
        found = [platform.endpoints.prediction(f"{batch}-0") for batch in owned]
        return [each for each in found if each.endpoint == "labelled"]

    shadowed = eventually(logged)[0]
    answered = eventually(lambda: platform.endpoints.prediction(shadowed.request))
    platform.endpoints.feedback(
        "labelled",
        predictions=(GroundTruth(id=shadowed.id, value=5), GroundTruth(id=answered.id, value=5)),
    )
    stats = {each.version: each for each in platform.endpoints.stats("labelled").versions}

    assert (shadowed.shadow, shadowed.version, shadowed.outputs) == (True, "3", {"y": [3.0]})
    assert (answered.shadow, answered.version, answered.outputs) == (False, "1", {"y": [1.0]})
    assert (stats["3.shadow"].labelled, stats["3.shadow"].score_mean) == (1, 4.0)
    assert (stats["1"].labelled, stats["1"].score_mean) == (1, 16.0)
    assert "3" not in stats


def test_a_report_starts_again_when_the_routes_change(platform: OwnPlatform) -> None:
    platform.endpoints.deploy("restarted", model="m@1")
    platform.endpoints.route("restarted", routes=SHADED)
    counts = ShadowCounts(version="3", against="1", requests=2, dropped=1)
    server = _server(platform)

    with acting_as(server):
        platform.parts.services.endpoints.report("restarted", shadows=(counts, counts))
        platform.parts.services.endpoints.report(
            "restarted", shadows=(counts.model_copy(update={"version": "2"}),)
        )
    before = platform.endpoints.shadow_report("restarted").differences
    platform.endpoints.route("restarted", routes=SHADED)

    assert [(each.version, each.requests, each.dropped) for each in before] == [("3", 4, 2)]
    assert platform.endpoints.shadow_report("restarted").differences == ()


def _server(platform: OwnPlatform) -> Identity:
    from falaj.assembly.model_server import service_caller
    from falaj.records.governance.identity import Role

    found = service_caller(platform.parts.gate, MODEL_SERVER, Role.OPERATOR)
    return Identity(PrincipalId(found.id), found.name, "service", "local")


def test_a_header_override_and_a_sticky_header_work_end_to_end(
    platform: OwnPlatform, client: httpx.Client, tmp_path: Path
) -> None:
    platform.endpoints.deploy("sticky", model="m@1")
    routes = (Route(version="1", weight=50), Route(version="2", weight=50), Route(version="3", weight=0))
    platform.endpoints.route("sticky", routes=routes, sticky="header")
    eventually(lambda: ask(client, "sticky", **{"Falaj-Version": "3"}))

    def of(key: int) -> set[str]:
        answers = [ask(client, "sticky", **{"Falaj-Key": str(key)}) for _ in range(3)]
        return {each["model_version"] for each in answers if each is not None}

    found = [of(key) for key in range(16)]

    assert all(len(each) == 1 for each in found)
    assert set().union(*found) == {"1", "2"}


# ---------------------------------------------------------------------------------------------------- load


def test_the_load_shows_endpoints_that_the_caller_may_see(
    platform: OwnPlatform, client: httpx.Client
) -> None:
    platform.endpoints.deploy("busy", model="m@2")
    eventually(lambda: ask(client, "busy"))

    before = platform.endpoints.load()
    for _ in range(20):
        ask(client, "busy")
    now = platform.endpoints.load()

    rates = rates_between(before, now)
    (busy,) = (each for each in rates.versions if each.endpoint == "busy")
    assert (busy.version, busy.replica, busy.waiting, busy.batch_rows) == ("2", "0", 0, 1.0)
    assert busy.requests_per_s * rates.over_s == pytest.approx(20)
    assert busy.errors_per_s == 0
    assert busy.p99_ms is not None
    assert rates.replicas[0].rss_bytes > 1 << 20
    head, headings, rows, _ = lines(rates)
    assert head[1].startswith("replica 0: ")
    shown = dict(zip(headings, rows[0], strict=True))
    assert (shown["endpoint"], shown["version"], shown["waiting"]) == ("busy", "2", "0")
    assert "replica" not in shown  # there is one


def test_the_load_of_another_workspace_is_not_shown(platform: OwnPlatform, client: httpx.Client) -> None:
    platform.endpoints.deploy("mine", model="m@1")
    eventually(lambda: ask(client, "mine"))
    platform.workspaces.create("elsewhere")

    assert platform.endpoints.load(workspace="elsewhere").versions == ()


def test_the_load_of_a_server_that_does_not_run_is_unavailable(tmp_path: Path) -> None:
    with make_platform(tmp_path) as other, pytest.raises(Unavailable, match="does not run"):
        other.endpoints.load()


def test_a_replica_that_started_again_is_counted_from_its_start() -> None:
    def load(pid: int, clock_s: float, requests: int) -> ServerLoad:
        replica = ReplicaUsage(
            replica="0", pid=pid, clock_s=clock_s, cpu_s=clock_s, rss_bytes=1, connections=0
        )
        version = VersionLoad(
            endpoint=ObjectId("endpoint_1"),
            name="e",
            version="1",
            replica="0",
            requests=requests,
            errors=0,
            rows=requests,
            latency=(requests,),
            batches=0,
            batch_rows=0,
            waiting=0,
        )
        return ServerLoad(replicas=(replica,), versions=(version,))

    steady = rates_between(load(1, 10, 100), load(1, 12, 300))
    again = rates_between(load(1, 10, 100), load(2, 0.5, 7))

    assert (steady.versions[0].requests_per_s, steady.replicas[0].cpu) == (100.0, 1.0)
    assert (again.versions[0].requests_per_s, again.replicas[0].cpu) == (7.0, 0.0)
