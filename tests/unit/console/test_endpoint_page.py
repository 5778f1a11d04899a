"""One endpoint: its split, its rates, the evidence of its canary, and the form that is made from the signature."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from falaj.apps.console.charts.palette import LIGHT
from falaj.apps.console.pages.endpoints.canary import canary_view
from falaj.apps.console.pages.endpoints.endpoint import EndpointRecords, endpoint_view
from falaj.apps.console.pages.endpoints.table import endpoint_state, endpoints_view, split_words
from falaj.apps.console.pages.endpoints.traffic import TrafficHistory, rates_between
from falaj.apps.console.pages.endpoints.try_it import TryForm, answer_view, infer_inputs, try_form
from falaj.apps.console.times import Times
from falaj.errors import InvalidInput
from falaj.records.control.pipelines import (
    Canary,
    CanaryOutcome,
    CanaryPoint,
    CanaryProgress,
    CanaryVerdict,
    EvidencePoint,
)
from falaj.records.governance.residency import UNRESTRICTED
from falaj.records.registry import ModelVersion, TensorSpec
from falaj.records.serving.endpoints import DeployedEndpoint, Route, ServedRoute
from falaj.records.serving.lookups import Lookup, ViewLookup
from falaj.records.serving.predictions import InferenceResult, InferOutput
from falaj.records.serving.shadows import OutputDifference, ShadowDifference, ShadowReport
from falaj.records.serving.statistics import (
    EndpointStats,
    ReplicaUsage,
    ServerLoad,
    VersionLoad,
    VersionStats,
)
from falaj.records.serving.tensors import Datatype

NOON = datetime(2026, 11, 17, 12, tzinfo=UTC)
TIMES = Times(UTC)


def endpoint(*routes: ServedRoute, **more: object) -> DeployedEndpoint:
    fields: dict[str, object] = {
        "id": "endpoint_1",
        "workspace": "w",
        "name": "delay",
        "model": "delay",
        "routes": routes or (route("1", 100),),
        "label": UNRESTRICTED,
        "created_at": NOON,
        "changed_at": NOON,
    }
    return DeployedEndpoint.model_validate(fields | more)


def route(version: str, weight: int, **more: object) -> ServedRoute:
    return ServedRoute.model_validate(
        {"version": version, "weight": weight, "id": f"version_{version}"} | more
    )


def version(*inputs: TensorSpec) -> ModelVersion:
    return ModelVersion.model_construct(inputs=inputs, outputs=())


def test_the_split_is_in_percent_and_names_shadows_and_problems() -> None:
    found = endpoint(
        route("1", 150),
        route("2", 50, problem="<b>no file"),
        route("3", 0, shadow=20),
        previous=(Route(version="1"),),
    )

    view = endpoint_view(EndpointRecords(found), times=TIMES)

    assert [(each.version, each.share, each.notes, each.problem) for each in view.routes] == [
        ("1", 75.0, "", ""),
        ("2", 25.0, "", "<b>no file"),
        ("3", 0.0, "shadow of 20 %", ""),
    ]
    assert view.previous_words == "100 % to version 1"
    assert split_words(found) == "version 1: 75 %, version 2: 25 %, version 3: shadow of 20 %"
    assert (endpoint_state(found), endpoint_state(endpoint(problem="down"))) == ("error", "failed")
    assert endpoints_view([found], times=TIMES).lines[0].state == "error"


def test_statistics_and_shadows_are_shown_with_their_figures() -> None:
    stats = EndpointStats(
        endpoint="delay",
        since=NOON,
        scoring=None,
        versions=(
            VersionStats(version="1", requests=1234, errors=2, p50_ms=1.5, labelled=7, score_mean=0.25),
        ),
    )
    output = OutputDifference(output="y", values=10, sum_difference=5.0, classes=10, disagreeing=1)
    difference = ShadowDifference(
        version="2",
        against="1",
        since=NOON,
        requests=9,
        rows=9,
        errors=0,
        dropped=1,
        p50_ms=1,
        p99_ms=2,
        against_p50_ms=1,
        against_p99_ms=3,
        outputs=(output,),
    )
    report = ShadowReport(endpoint="delay", shadows=(), differences=(difference,))

    view = endpoint_view(EndpointRecords(endpoint(), stats=stats, shadows=report), times=TIMES)

    assert (view.stats[0].requests, view.stats[0].p50, view.stats[0].score) == ("1,234", "1.5", "0.25")
    assert (view.shadows[0].difference, view.shadows[0].disagreement, view.shadows[0].p99) == (
        "0.5",
        "10.00 %",
        "2, 3",
    )


# ---------------------------------------------------------------------------------------------- rates


def load(clock_s: float, requests: int, latency: tuple[int, ...], *, pid: int = 1) -> ServerLoad:
    return ServerLoad(
        replicas=(ReplicaUsage(replica="r", pid=pid, clock_s=clock_s, cpu_s=0, rss_bytes=0, connections=0),),
        versions=(
            VersionLoad(
                endpoint="endpoint_1",
                name="delay",
                version="1",
                replica="r",
                requests=requests,
                errors=0,
                rows=requests,
                latency=latency,
                batches=0,
                batch_rows=0,
                waiting=3,
            ),
        ),
    )


def test_rates_are_differences_over_the_clock_of_the_replica() -> None:
    (found,) = rates_between(load(10, 100, (0, 100)), load(12, 300, (0, 100, 200)))

    assert (found.requests_per_s, found.waiting) == (100.0, 3)
    assert found.p50_ms == pytest.approx(0.35)  # the middle of the bucket from 0.2 to 0.5 ms


def test_a_replica_that_was_started_anew_gives_no_negative_rates() -> None:
    assert rates_between(load(100, 500, (500,)), load(1, 5, (5,), pid=2)) == ()


def test_the_charts_have_a_curve_for_each_version_with_units() -> None:
    history = TrafficHistory()
    for second in range(3):
        history.add(load(second, second * 10, (second * 10,)), NOON)

    throughput, latency = history.throughput("delay", LIGHT), history.latency("delay", LIGHT)

    assert [series["name"] for series in throughput["series"]] == ["version 1"]
    assert throughput["yAxis"]["name"] == "requests [1/s]"
    assert [series["name"] for series in latency["series"]] == ["version 1 p50", "version 1 p99"]
    assert latency["yAxis"]["name"] == "latency [ms]"


# --------------------------------------------------------------------------------------------- canary


def evidence(compared: int, worse: float) -> EvidencePoint:
    return EvidencePoint(
        metric="error_rate",
        compared=compared,
        champion=0.01,
        challenger=0.03,
        margin=0.01,
        worse=worse,
        worse_needed=200,
        within=0.5,
        within_needed=20,
        more=90,
        low=-0.01,
        high=0.05,
    )


def test_a_canary_shows_its_difference_with_bounds_and_the_evidence_with_what_is_needed() -> None:
    points = tuple(
        CanaryPoint(number=at, at=NOON, requests=at, labels=0, metrics=(evidence(at * 10, float(at)),))
        for at in (0, 1, 2)
    )
    found = CanaryProgress(
        endpoint="delay",
        work="work_1",
        plan=Canary(),
        champion="1",
        challenger="2",
        since=NOON,
        outcome=CanaryOutcome.UNDECIDED,
        words="20 requests",
        evidence=(evidence(20, 2.0),),
        points=points,
        ended=CanaryVerdict(outcome=CanaryOutcome.ROLL_BACK, promote=False, words="it is worse: <b>"),
    )

    view = canary_view(found, times=TIMES)

    assert view is not None
    (plot,) = view.plots
    assert (plot.counts, plot.low) == ((10.0, 20.0), (-1.0, -1.0))
    assert plot.difference == pytest.approx((2.0, 2.0))
    assert (plot.worse, plot.worse_needed) == ((1.0, 2.0), 200)
    assert (view.lines[0].challenger, view.lines[0].worse, view.lines[0].more) == (
        "3 %",
        "2 of 200",
        "about 90",
    )
    assert view.ended == ("rolled back", "bad", "it is worse: <b>")
    much = canary_view(found.model_copy(update={"evidence": (evidence(20, 9.2e18),)}), times=TIMES)
    assert much is not None
    assert much.lines[0].worse == "over 1,000,000 of 200"
    assert view.work == "work_1"


def test_without_a_canary_there_is_nothing_to_show() -> None:
    assert canary_view(None, times=TIMES) is None
    ended = CanaryVerdict(outcome=CanaryOutcome.PROMOTE, promote=True, words="fine")
    over = canary_view(CanaryProgress(endpoint="delay", ended=ended), times=TIMES)
    assert over is not None
    assert (over.state, over.ended) == ("", ("promoted", "good", "fine"))


# --------------------------------------------------------------------------------------------- try it


def test_the_form_has_a_field_for_each_feature_of_the_signature() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=(-1, 2), features=("distance", "wind"))

    form = try_form(endpoint(route("1", 50), route("2", 50, problem="broken")), version(spec))

    assert (form.inputs[0].columns, form.inputs[0].shape, form.versions) == (
        ("distance", "wind"),
        (1, 2),
        ("1",),
    )
    (given,) = infer_inputs(form, [["1.5", " 2 "]])
    assert (given.name, given.shape, given.datatype, given.data) == ("x", (1, 2), Datatype.FP32, [1.5, 2.0])


def test_inputs_of_all_types_are_read_from_text() -> None:
    specs = [
        TensorSpec(name="flag", dtype="bool", shape=(-1, 1)),
        TensorSpec(name="count", dtype="int64", shape=(-1,)),
        TensorSpec(name="text", dtype="string", shape=(-1, 1)),
        TensorSpec(name="wide", dtype="float32", shape=(-1, 8, 8)),
    ]
    form = try_form(endpoint(), version(*specs))

    found = infer_inputs(form, [["true"], ["7"], [" <b> "], [", ".join(["1"] * 64)]])

    assert [each.data[:1] for each in found] == [[True], [7], [" <b> "], [1.0]]
    assert form.inputs[3].columns == ()


@pytest.mark.parametrize(
    ("typed", "words"), [("", "a number"), ("abc", "a number"), ("inf", "a number"), ("nan", "a number")]
)
def test_what_is_no_number_is_refused_in_the_words_of_the_platform(typed: str, words: str) -> None:
    form = try_form(
        endpoint(), version(TensorSpec(name="x", dtype="float32", shape=(-1, 1), features=("wind",)))
    )

    with pytest.raises(InvalidInput) as refused:
        infer_inputs(form, [[typed]])

    assert (refused.value.faults[0].where, refused.value.faults[0].allowed) == ("wind", words)


def test_too_few_values_are_refused() -> None:
    form = try_form(endpoint(), version(TensorSpec(name="x", dtype="float32", shape=(-1, 100))))

    with pytest.raises(InvalidInput, match="x"):
        infer_inputs(form, [["1, 2"]])


def test_an_endpoint_with_a_lookup_asks_for_keys_and_for_what_the_request_gives() -> None:
    view = ViewLookup(view="board", keys=("flight",), key_types=(Datatype.INT64,), features=("delay",))
    lookup = Lookup(views=(view,), features=("delay", "board__delay", "wind"))

    form = try_form(endpoint(lookup=lookup), version())

    assert [(each.name, each.datatype) for each in form.inputs] == [
        ("flight", Datatype.INT64),
        ("wind", Datatype.FP64),
    ]


def test_a_bare_name_that_two_views_have_comes_from_the_request() -> None:
    views = (ViewLookup(view="a", features=("delay",)), ViewLookup(view="b", features=("delay", "rain")))

    form = try_form(endpoint(lookup=Lookup(views=views, features=("delay", "rain"))), version())

    assert [each.name for each in form.inputs] == ["delay"]


def test_a_version_without_a_signature_has_no_fields() -> None:
    assert try_form(endpoint(), None) == TryForm((), ("1",))


def test_an_answer_shows_who_answered_and_why() -> None:
    found = InferenceResult(
        model_name="delay",
        model_version="1",
        id="r",
        prediction="predictions_1-0",
        outputs=(InferOutput(name="y", datatype="FP32", shape=(1, 300), data=[0.5] * 300),),
        fallback_from="2",
        fallback_reason="unavailable",
    )

    view = answer_view(found)

    assert (view.version, view.prediction) == ("1", "predictions_1-0")
    assert view.outputs[0][2].endswith("0.5 …")
    assert view.notes == ("version 2 failed (unavailable), so this one answered",)
