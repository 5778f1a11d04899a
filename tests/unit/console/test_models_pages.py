"""Pages of models: the list, one model, the evidence beside the buttons, one version, variants, and differences."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from console_data import HOSTILE_CARD, make_features, make_version
from falaj.apps.console.charts.graphs import ParetoPoint
from falaj.apps.console.components.states import BAD, GOOD
from falaj.apps.console.components.texts import markdown_html
from falaj.apps.console.pages.models.catalogue import model_list
from falaj.apps.console.pages.models.diff import diff_view
from falaj.apps.console.pages.models.evidence import AliasEvidence, EvidenceRecords, evidence
from falaj.apps.console.pages.models.model import ModelView, model_view, read_records
from falaj.apps.console.pages.models.variants import variants
from falaj.apps.console.pages.models.version import VersionRecords, version_view, without_images
from falaj.apps.console.times import Times
from falaj.governance.operations.caller import acting_as
from falaj.records.control.workflows import WorkflowRun, WorkflowState
from falaj.records.governance.identity import Role
from falaj.records.optimization import (
    AcceptanceBudget,
    Measurement,
    Optimization,
    OptimizationReport,
    OptimizationVerdict,
    ParetoRow,
    Variant,
)
from platforms import OwnPlatform

TIMES = Times(UTC)
NOON = datetime(2026, 11, 17, 12, tzinfo=UTC)


@pytest.fixture
def churn(light_platform: OwnPlatform) -> OwnPlatform:
    """A model with three versions; champion is protected, points at the first, and has a gate that the last fails."""
    for auc in (0.90, 0.93, 0.70):
        make_version(light_platform, "churn", auc=auc)
    light_platform.models.promote("churn@1", to="champion")
    light_platform.models.set_gates("churn", alias="champion", metrics=("auc >= champion - 0.01",))
    light_platform.models.protect("churn", alias="champion")
    return light_platform


def model_of(platform: OwnPlatform) -> ModelView:
    return model_view(read_records(platform, "default", "churn"), times=TIMES)


def evidence_of(
    platform: OwnPlatform, version: str, *, person: str = "", alias: str = "champion"
) -> AliasEvidence:
    found = platform.models.version(version)
    aliases = {each.alias: each for each in platform.models.show("churn").aliases}
    known = aliases.get(alias)
    other = known.version if known is not None and known.version != found.reference else None
    records = EvidenceRecords(
        version=found,
        alias=alias,
        known=known,
        gates=platform.models.check_gates(version, alias=alias),
        approvals=platform.models.approvals(version, alias=alias).items,
        diff=None if other is None else platform.models.diff(other, version),
    )
    return evidence(records, person=person, times=TIMES)


def test_models_are_found_by_name_and_alias(churn: OwnPlatform) -> None:
    make_version(churn, "fraud", auc=0.8)
    listed = churn.models.list().items

    every = model_list(listed, words="", times=TIMES)

    assert [(row.name, row.versions, row.aliases, row.protected) for row in every.rows] == [
        ("churn", 3, "champion → 1", "champion"),
        ("fraud", 1, "none", "none"),
    ]
    assert [row.name for row in model_list(listed, words="CHAMP", times=TIMES).rows] == ["churn"]


def test_a_model_shows_versions_history_and_what_waits_for_approval(churn: OwnPlatform) -> None:
    view = model_of(churn)

    assert [(line.number, line.aliases) for line in view.versions] == [(3, ""), (2, ""), (1, "champion")]
    (champion,) = view.aliases
    assert [move[1:4] for move in champion.moves] == [
        ("protect", "churn@1", "churn@1"),
        ("promote", "churn@1", "–"),
    ]
    assert [(each.version, each.passes) for each in view.waiting] == [("churn@3", False), ("churn@2", True)]


def test_an_approved_version_waits_no_longer_and_can_be_rolled_back(churn: OwnPlatform) -> None:
    with acting_as(churn.join("noor", Role.APPROVER)):
        churn.models.approve("churn@2", alias="champion")
    before = [each.version for each in model_of(churn).waiting]
    churn.models.promote("churn@2", to="champion")

    (champion,) = model_of(churn).aliases

    assert before == ["churn@3"]
    assert champion.moves[0][1:] == ("promote", "churn@2", "churn@1", "owner, approved by noor")
    assert champion.back_to == "churn@1"
    assert ("auc", "0.93", "0.9") in champion.compared


def test_a_canary_that_waits_is_among_the_approvals(churn: OwnPlatform) -> None:
    records = read_records(churn, "default", "churn")
    said = "waits for approval: falaj models approve churn@2 --alias best, by someone else"
    work = WorkflowRun(
        id="work_1",
        workspace="workspace_1",
        workflow="pipelines.canary",
        state=WorkflowState.RUNNING,
        doing=said,
        created_at=NOON,
    )
    ended = work.model_copy(update={"id": "work_2", "state": WorkflowState.DONE})

    running = model_view(replace(records, work=[work]), times=TIMES)
    done = model_view(replace(records, work=[ended]), times=TIMES)

    assert ("churn@2", "best") in [(each.version, each.alias) for each in running.waiting]
    assert ("churn@2", "best") not in [(each.version, each.alias) for each in done.waiting]


def test_a_protected_alias_has_no_promotion_before_someone_else_approved(churn: OwnPlatform) -> None:
    author = churn.models.version("churn@2").author
    noor = churn.join("noor", Role.APPROVER)

    before = evidence_of(churn, "churn@2", person=author)
    with acting_as(noor):
        churn.models.approve("churn@2", alias="champion", comment="good <b>enough</b>")
    after = evidence_of(churn, "churn@2", person=author)

    assert before.promote_blocked == "churn@2 waits for the approval of someone else for champion."
    assert before.approve_blocked == "You made churn@2: someone else approves it."
    assert evidence_of(churn, "churn@2", person=noor.id).approve_blocked == ""
    assert after.promote_blocked == ""
    assert [(by, comment) for by, _, comment in after.approvals] == [("noor", "good <b>enough</b>")]


def test_the_evidence_compares_with_the_version_that_the_alias_has(churn: OwnPlatform) -> None:
    better, worse = evidence_of(churn, "churn@2"), evidence_of(churn, "churn@3")

    assert ("auc", "0.9", "0.93", "+0.03") in better.metrics
    assert [gate.tone for gate in better.gates] == [GOOD]
    assert [gate.tone for gate in worse.gates] == [BAD]
    assert worse.promote_blocked == worse.approve_blocked
    assert worse.promote_blocked.startswith("churn@3 fails the gates: auc")


def test_the_version_of_the_alias_needs_no_button(churn: OwnPlatform) -> None:
    found = evidence_of(churn, "churn@1")

    assert found.promote_blocked == found.approve_blocked == "churn@1 is champion now."


def test_an_alias_without_protection_needs_no_approval(churn: OwnPlatform) -> None:
    found = evidence_of(churn, "churn@2", alias="best")

    assert (found.promote_blocked, found.current) == ("", "")
    assert found.metrics[0] == ("auc", "–", "0.93", "–")


def test_a_version_shows_its_facts_and_origins(light_platform: OwnPlatform) -> None:
    data = make_features(light_platform, "churn")
    made = make_version(light_platform, "churn", auc=0.9, training_set=data.training.id)
    light_platform.models.record_metrics(made.id, on=data.training.id, metrics={"auc": 0.88})
    light_platform.models.promote(made.id, to="champion")
    records = VersionRecords(
        made,
        light_platform.models.show("churn"),
        light_platform.models.card(made.id),
        nodes=[*light_platform.lineage.graph(made.id)],
    )

    view = version_view(records, person="", times=TIMES)

    assert view.words == "model version, champion of churn"
    assert view.origins == (("training set", "churn-training", ("lineage", data.training.id)),)
    assert ("auc", "0.9", "at registration") in view.metrics
    assert ("auc", "0.88", "on churn-training, by owner") in view.metrics
    assert view.tensors[0] == ("input", "features", "float32", "any × 2", "minutes, plan")
    assert dict(view.about)["restriction"] == "any jurisdiction; personal"
    assert "churn-calls" in [item.name for item in view.lineage.upstream]
    assert view.variants is None


def test_a_hostile_card_becomes_harmless_html(light_platform: OwnPlatform) -> None:
    made = make_version(light_platform, "churn", auc=0.9, card=HOSTILE_CARD)
    card = light_platform.models.card(made.id).markdown

    html = markdown_html(without_images(card)).lower()

    assert "<script" not in html
    assert "<img" not in html
    assert "javascript:" not in html
    assert "<strong>bold words</strong>" in html


def measured(latency: float, loss: float) -> Measurement:
    return Measurement(
        latency_p50_us=latency,
        latency_p99_us=2 * latency,
        rows_per_s_32=1e5,
        rows_per_s=2e5,
        best_batch=256,
        cpu_us_per_row=1.0,
        size_bytes=2048,
        loss=loss,
    )


def test_variants_show_latency_quality_and_reasons() -> None:
    original, small = measured(120.0, 0.20), measured(40.0, 0.21)
    variant = Variant(
        recipe="int8",
        verdict=OptimizationVerdict.ACCEPTED,
        reason="3 times as fast",
        measured=small,
        version="churn@2",
    )
    table = (
        ParetoRow(
            name="original",
            device="cpu",
            latency_p50_us=120.0,
            rows_per_s=2e5,
            best_batch=256,
            size_bytes=2048,
            quality=0.20,
            on_front=True,
        ),
        ParetoRow(
            name="int8",
            device="cpu",
            verdict=OptimizationVerdict.ACCEPTED,
            latency_p50_us=40.0,
            rows_per_s=2e5,
            best_batch=256,
            size_bytes=1024,
            quality=None,
            version="churn@2",
        ),
    )
    found = Optimization(
        id="optimization_1",
        workspace="workspace_1",
        model="churn@1",
        data="held",
        target="late",
        features=(),
        budget=AcceptanceBudget(),
        job="job_1",
        report=OptimizationReport(
            metric="log_loss", rows=100, host="a machine", original=original, variants=(variant,)
        ),
        created_at=NOON,
        table=table,
    )

    view = variants([found], "churn@2", times=TIMES)

    assert view is not None
    (shown,) = view.optimizations
    assert shown.title == "Variants of churn@1, measured 2026-11-17 12:00:00"
    assert shown.points == (
        ParetoPoint("original", 120.0, 0.20),
    )  # one without a quality has no place in the plot
    assert not shown.higher_is_better
    assert [(row.name, row.latency, row.verdict) for row in shown.rows] == [
        ("original", "120 µs", "–"),
        ("int8", "40 µs", "accepted"),
    ]
    assert shown.reasons == (("int8", "accepted", "3 times as fast"),)


def test_a_difference_has_its_parts(churn: OwnPlatform) -> None:
    make_version(churn, "churn", auc=0.9, card="other words", environment={"python": "3.13"})

    view = diff_view(churn.models.diff("churn@1", "churn@4"))
    same = diff_view(churn.models.diff("churn@1", "churn@1"))

    assert ("auc", "0.9", "0.9", "+0") in view.metrics
    assert ("python", "–", "3.13") in dict(view.sections)["Environment"]
    assert ("good", "+other words") in view.card
    assert same.is_equal
    assert not view.is_equal
