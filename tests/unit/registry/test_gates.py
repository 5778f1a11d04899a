"""Gates of aliases: thresholds on a pinned set, checks, waivers, and the evidence that is kept."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from falaj.errors import Conflict, Denied, FalajError, InvalidInput, NotFound
from falaj.governance.operations.caller import Caller, acting_as
from falaj.ports.metadata import Transaction
from falaj.records.governance.identity import Role
from falaj.records.models.gates import CheckFinding, parse_rule
from falaj.records.registry import ModelVersion
from falaj.registry.service import Models
from falaj.registry.tables import gates, measurements, versions
from platforms import OwnPlatform

if TYPE_CHECKING:
    from conftest import MakeDataset, Register  # type: ignore[attr-defined]

RULE = "auc >= champion - 0.002"


@pytest.fixture
def measured(models: Models, register: Register, make_dataset: MakeDataset) -> str:
    """A champion, churn@1, a challenger, churn@2, and a pinned set on which the champion's auc is 0.932."""
    data = make_dataset("holdout-1").id
    register(), register()
    models.promote("churn@1", to="champion")
    models.record_metrics("churn@1", on=data, metrics={"auc": 0.932})
    models.set_gates("churn", alias="champion", metrics=(RULE,), on=data)
    return data


def refusal(models: Models, version: str = "churn@2", alias: str = "champion") -> Denied:
    with pytest.raises(Denied) as refused:
        models.promote(version, to=alias)
    assert refused.value.details["rule"] == "registry.gate"
    return refused.value


# --------------------------------------------------------------------------------------------- thresholds


def test_a_version_below_the_champion_is_refused_with_value_threshold_and_fix(
    platform: OwnPlatform, models: Models, measured: str
) -> None:
    models.record_metrics("churn@2", on=measured, metrics={"auc": 0.92999})

    refused = refusal(models)

    (fault,) = refused.faults
    assert fault.where == "gate auc >= champion - 0.002 on holdout-1"
    assert fault.given == "auc 0.92999"
    assert fault.allowed == ">= 0.93: champion is churn@1 with 0.932"
    assert fault.fix == "promote a version whose auc is higher"
    assert "waive-gates churn@2 --alias champion" in refused.details["needs"]
    assert "auc 0.92999, allowed is >= 0.93" in refused.message
    assert models.resolve("churn", alias="champion").reference == "churn@1"
    outcomes = [each["outcome"] for each in platform.entries() if each["action"] == "models.promote"]
    assert outcomes == ["done", "denied"]


def test_numbers_are_compared_as_they_are_written(
    platform: OwnPlatform, models: Models, measured: str
) -> None:
    models.record_metrics("churn@2", on=measured, metrics={"auc": 0.93})  # 0.932 - 0.002 in floats is more

    moved = models.promote("churn@2", to="champion")

    (result,) = moved.change.evidence.gates
    assert (result.passed, result.value) == (True, "auc 0.93")


def test_a_metric_that_was_not_measured_on_the_set_is_refused_with_the_command(
    light_platform: OwnPlatform, models: Models, register: Register, measured: str
) -> None:
    register(metrics={"auc": 0.99})  # by its own author, on some data

    (fault,) = refusal(models, "churn@3").faults

    assert fault.given == "churn@3 has no auc"
    assert fault.fix == "falaj models record-metrics churn@3 --on holdout-1 --metrics '{\"auc\": VALUE}'"


def test_a_metric_that_the_champion_does_not_have_is_refused(
    light_platform: OwnPlatform, models: Models, measured: str
) -> None:
    models.set_gates("churn", alias="champion", metrics=("f1 >= champion - 0.1",), on=measured)
    models.record_metrics("churn@2", on=measured, metrics={"f1": 0.9})

    (fault,) = refusal(models).faults

    assert fault.given == "churn@1 has no f1; it has auc"
    assert "record-metrics churn@1 --on holdout-1" in fault.fix


def test_without_a_champion_a_comparison_passes_and_a_number_holds(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register(metrics={"auc": 0.8, "latency_ms": 12.5})
    models.set_gates("churn", alias="champion", metrics=(RULE, "auc >= 0.9", "latency_ms <= 10"))

    faults = refusal(models, "churn@1").faults

    assert [fault.allowed for fault in faults] == [">= 0.9", "<= 10"]
    models.set_gates("churn", alias="champion", metrics=(RULE,))
    assert models.promote("churn@1", to="champion").change.version == "churn@1"


def test_an_alias_can_be_compared_with_another(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register(metrics={"auc": 0.9}), register(metrics={"auc": 0.8})
    models.promote("churn@1", to="champion")
    models.set_gates("churn", alias="staging", metrics=("auc >= champion - 0.05",))

    assert "champion is churn@1 with 0.9" in refusal(models, "churn@2", "staging").faults[0].allowed


@pytest.mark.parametrize("alias", ["chmapion", "nan", "inf"])
def test_a_rule_with_an_alias_that_points_nowhere_is_refused(
    light_platform: OwnPlatform, models: Models, register: Register, alias: str
) -> None:
    register(metrics={"auc": 0.9})
    models.set_gates("churn", alias="champion", metrics=(f"auc >= {alias}",))

    assert refusal(models, "churn@1").faults[0].given == f"churn has no {alias}"


@pytest.mark.parametrize(
    "rule",
    [
        "auc",
        "auc > 0.9",
        "auc >= Champion",
        "auc >= 0.9 - 0.1",
        ">= 1",
        "a b >= 1",
        "auc >= 1e400",
    ],
)
def test_a_rule_that_cannot_be_read_is_refused(
    light_platform: OwnPlatform, models: Models, register: Register, rule: str
) -> None:
    register()

    with pytest.raises(InvalidInput, match="a rule is METRIC"):
        models.set_gates("churn", alias="champion", metrics=(rule,))


def test_rules_are_read() -> None:
    assert parse_rule("auc >= champion - 0.002")[:3] == ("auc", ">=", "champion")
    assert parse_rule("loss<=champion+1e-3").bound == parse_rule("loss <= 0.001").bound
    assert parse_rule("bias >= -0.5").bound == -parse_rule("bias >= 0.5").bound


# ------------------------------------------------------------------------------------------- measurements


def test_a_measurement_is_never_changed(platform: OwnPlatform, models: Models, measured: str) -> None:
    models.record_metrics("churn@1", on=measured, metrics={"auc": 0.932, "f1": 0.5})

    with pytest.raises(Conflict, match=r"'auc' of churn@1 on holdout-1 is 0\.932 already"):
        models.record_metrics("churn@1", on=measured, metrics={"auc": 0.999, "recall": 0.1})

    stored = {(row["metric"], row["value"]) for row in platform.rows(measurements)}
    assert stored == {("auc", 0.932), ("f1", 0.5)}


@pytest.mark.parametrize("metrics", [{}, {"auc": float("nan")}, {"auc": float("-inf")}, {"": 1.0}])
def test_metrics_that_are_none_are_refused(
    light_platform: OwnPlatform, models: Models, measured: str, metrics: dict[str, float]
) -> None:
    with pytest.raises(InvalidInput):
        models.record_metrics("churn@2", on=measured, metrics=metrics)


def test_metrics_are_recorded_on_training_sets_only(
    light_platform: OwnPlatform, models: Models, measured: str
) -> None:
    for other in ("no-such-set", "churn@1", models.version("churn@1").files[0].blob):
        with pytest.raises(FalajError) as refused:
            models.record_metrics("churn@2", on=other, metrics={"auc": 1.0})
        assert isinstance(refused.value, NotFound | InvalidInput)


def test_two_measurements_at_once_do_not_contradict(
    platform: OwnPlatform, models: Models, measured: str
) -> None:
    def measure(value: float) -> bool:
        try:
            models.record_metrics("churn@2", on=measured, metrics={"auc": value})
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(measure, (0.1, 0.2, 0.3, 0.4)))

    assert sum(done) == 1
    assert [row["value"] for row in platform.rows(measurements) if row["value"] < 0.9] in (
        [[0.1], [0.2], [0.3], [0.4]][done.index(True)],
    )


# ------------------------------------------------------------------------------------------------- checks


def test_an_incomplete_card_is_refused(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register(licence="MIT")
    models.set_gates("churn", alias="champion", checks=("card-complete",))

    (fault,) = refusal(models, "churn@1").faults

    assert fault.where == "gate card-complete"
    assert fault.given.startswith("without card, metrics")
    assert "licence" not in fault.given


def test_an_unknown_check_is_refused_with_those_that_there_are(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register()

    with pytest.raises(InvalidInput) as refused:
        models.set_gates("churn", alias="champion", checks=("Card-Complete".lower(), "no-bugs"))

    assert refused.value.faults[0].allowed == "card-complete, no-drift-alert"


def test_a_service_adds_a_check(platform: OwnPlatform, models: Models, register: Register) -> None:
    asked: list[str] = []

    def fair(tx: Transaction, version: ModelVersion) -> CheckFinding:
        asked.append(version.reference)
        return CheckFinding(
            passed=False, value="gap 0.3", allowed="gap <= 0.1", fix="rebalance the training set"
        )

    extended = with_checks(models, {"fairness": fair})
    register()
    extended.set_gates("churn", alias="champion", checks=("fairness",))

    (fault,) = refusal(extended, "churn@1").faults

    assert (fault.given, fault.allowed, fault.fix) == ("gap 0.3", "gap <= 0.1", "rebalance the training set")
    assert asked == ["churn@1"]
    assert (
        "no such check" in refusal(models, "churn@1").faults[0].given
    )  # a platform that lost the service refuses


# ------------------------------------------------------------------------------- approvals and evidence


def test_an_approval_keeps_the_evidence_that_was_shown(
    platform: OwnPlatform, models: Models, measured: str, noor: Caller
) -> None:
    models.record_metrics("churn@2", on=measured, metrics={"auc": 0.94})
    models.protect("churn", alias="champion")
    with acting_as(noor):
        shown = models.card("churn@2")
        approved = models.approve("churn@2", alias="champion", comment="looked at it")
    moved = models.promote("churn@2", to="champion")

    evidence = approved.evidence
    assert evidence is not None
    assert evidence.card_sha256 == shown.sha256
    manifest = next(row["manifest"] for row in platform.rows(versions) if row["number"] == 2)
    assert evidence.manifest_sha256 == sha256(manifest.encode()).hexdigest()
    assert evidence.current == "churn@1"
    assert [(each.gate, each.passed) for each in evidence.gates] == [(f"{RULE} on holdout-1", True)]
    assert models.approvals("churn@2", alias="champion").items[0].evidence == evidence
    assert moved.change.evidence.approved_by == ("noor",)
    assert models.alias_history("churn", alias="champion").items[0].evidence == moved.change.evidence


def test_a_version_that_fails_a_gate_is_not_approved(
    light_platform: OwnPlatform, models: Models, measured: str, noor: Caller
) -> None:
    with acting_as(noor), pytest.raises(Denied, match="a gate of champion refuses churn@2"):
        models.approve("churn@2", alias="champion")

    assert models.approvals("churn@2", alias="champion").items == ()


def test_one_call_tells_what_was_champion_on_a_day(
    platform: OwnPlatform, models: Models, register: Register
) -> None:
    register(), register()
    start = platform.clock.now
    models.promote("churn@1", to="champion")
    platform.clock.advance(timedelta(days=2))
    models.promote("churn@2", to="champion")

    then = models.alias("churn", "champion", at=start + timedelta(days=1))
    now = models.alias("churn", "champion")
    before = models.alias("churn", "champion", at=start - timedelta(days=1))

    assert (then.version, then.change.by, then.change.at) == (
        "churn@1",
        models.alias_history("churn", alias="champion").items[0].by,
        start,
    )
    assert (now.version, now.change.previous) == ("churn@2", "churn@1")
    assert now.change.evidence is not None
    assert (before.version, before.change) == (None, None)
    models.rollback("churn", alias="champion")
    assert models.alias("churn", "champion").version == "churn@1"


# ------------------------------------------------------------------------------------------------ waivers


def test_an_administrator_cannot_promote_past_a_gate_but_waive_it_for_a_reason(
    platform: OwnPlatform, models: Models, measured: str
) -> None:
    models.record_metrics("churn@2", on=measured, metrics={"auc": 0.9})
    refusal(models)  # the caller is the administrator

    waiver = models.waive_gates("churn@2", alias="champion", reason="  the holdout has a broken week ")
    moved = models.promote("churn@2", to="champion")

    assert (waiver.reason, [each.gate for each in waiver.gates]) == (
        "the holdout has a broken week",
        [f"{RULE} on holdout-1"],
    )
    (result,) = moved.change.evidence.gates
    assert (result.passed, result.waived) == (False, True)
    assert moved.change.evidence.waivers == (waiver,)
    recorded = [(each["action"], each["outcome"]) for each in platform.entries()]
    assert recorded[-3:] == [
        ("models.promote", "denied"),
        ("models.waive_gates", "done"),
        ("models.promote", "done"),
    ]


def test_a_waiver_holds_for_what_failed_then_and_until_a_rollback(
    platform: OwnPlatform, models: Models, register: Register, measured: str
) -> None:
    register()
    models.record_metrics("churn@2", on=measured, metrics={"auc": 0.9})
    models.record_metrics("churn@3", on=measured, metrics={"auc": 0.95})
    models.waive_gates("churn@2", alias="champion", reason="trial")

    models.promote("churn@3", to="champion")  # the threshold has risen
    assert "champion is churn@3 with 0.95" in refusal(models).faults[0].allowed
    models.rollback("churn", alias="champion")
    models.promote("churn@2", to="champion")
    models.rollback("churn", alias="champion")
    assert "champion is churn@1" in refusal(models).faults[0].allowed


@pytest.mark.parametrize("reason", ["", "   ", "x" * 2001])
def test_a_waiver_needs_a_reason(
    light_platform: OwnPlatform, models: Models, measured: str, reason: str
) -> None:
    with pytest.raises(InvalidInput):
        models.waive_gates("churn@2", alias="champion", reason=reason)


def test_nothing_is_waived_where_nothing_fails(
    light_platform: OwnPlatform, models: Models, measured: str
) -> None:
    models.record_metrics("churn@2", on=measured, metrics={"auc": 0.99})

    with pytest.raises(Conflict, match="nothing to waive"):
        models.waive_gates("churn@2", alias="champion", reason="why not")


def test_the_author_does_not_waive_gates_of_a_protected_alias(
    platform: OwnPlatform, models: Models, measured: str
) -> None:
    models.protect("churn", alias="champion")

    with pytest.raises(Denied, match="someone else must waive its gates"):
        models.waive_gates("churn@2", alias="champion", reason="mine")

    other = platform.join("omar", Role.ADMIN)
    with acting_as(other):
        assert models.waive_gates("churn@2", alias="champion", reason="seen").by == "omar"


@pytest.mark.parametrize("role", [Role.VIEWER, Role.DEVELOPER, Role.APPROVER, Role.OPERATOR, Role.AUDITOR])
def test_only_an_administrator_changes_or_waives_gates(
    light_platform: OwnPlatform, models: Models, measured: str, role: Role
) -> None:
    caller = light_platform.join("pat", role)

    with acting_as(caller):
        for attempt in (
            lambda: models.set_gates("churn", alias="champion"),
            lambda: models.waive_gates("churn@2", alias="champion", reason="please"),
        ):
            with pytest.raises(Denied):
                attempt()
        assert models.gates("churn", alias="champion").metrics == (RULE,)


def test_gates_are_replaced_and_earlier_ones_are_kept(
    platform: OwnPlatform, models: Models, measured: str
) -> None:
    models.set_gates("churn", alias="champion", metrics=("auc >= 0.5", "auc >= 0.5"))
    models.set_gates("churn", alias="champion")

    now = models.gates("churn", alias="champion")

    assert (now.metrics, now.checks, now.seq) == ((), (), 3)
    assert [row["rules"]["metrics"] for row in platform.rows(gates)] == [[RULE], ["auc >= 0.5"], []]
    assert models.promote("churn@2", to="champion").change.evidence.gates == ()


def test_gates_are_those_of_one_alias_and_one_model(
    light_platform: OwnPlatform, models: Models, register: Register, measured: str
) -> None:
    register("other")

    assert models.promote("churn@2", to="staging").change.version == "churn@2"
    assert models.promote("other@1", to="champion").change.version == "other@1"
    report = models.check_gates("churn@2", alias="champion")
    assert (report.passed, len(report.results)) == (False, 1)
    with pytest.raises(InvalidInput):
        models.gates("churn", alias="Champion")
    with pytest.raises(NotFound):
        models.gates("chum", alias="champion")


def test_a_gate_that_is_set_meanwhile_holds_for_a_promotion(
    platform: OwnPlatform, models: Models, register: Register
) -> None:
    register(metrics={"auc": 0.1})
    for _ in range(5):
        register(metrics={"auc": 0.1})

    with ThreadPoolExecutor(6) as pool:
        guarded = pool.submit(models.set_gates, "churn", alias="champion", metrics=("auc >= 0.5",))
        moves = [pool.submit(models.promote, f"churn@{n}", to="champion") for n in range(1, 6)]
    at = guarded.result().at

    for move in moves:
        if move.exception() is None:
            assert move.result().change.evidence.gates == () or move.result().change.at < at
        else:
            assert isinstance(move.exception(), Denied)
    refusal(models, "churn@6")


def with_checks(models: Models, checks: Mapping[str, Any]) -> Models:
    """Return the registry with more checks, as assembly hands them in."""
    return Models(
        models.gate,
        models._blobs,
        models._signatures._keys,
        parsers=models._parsers,
        lookups=models._composer.lookups,
        intents=models._intents,
        evaluations=models._evaluations,
        checks=checks,
    )
