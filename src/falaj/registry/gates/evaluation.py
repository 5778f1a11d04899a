"""Evaluates the gates of an alias for a version, and keeps what was found as evidence.

The gates are evaluated in the transaction that approves or promotes, while the alias is locked. A version that fails is
refused, whoever asks. An administrator can waive a failure: by an operation of its own, with a reason, for one version
and alias, and for exactly what failed then; a rollback from the version withdraws it (decision 0057).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from hashlib import sha256

from falaj.errors import Conflict, Denied, Fault, InvalidInput
from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.ports.metadata import Transaction
from falaj.records.models.gates import (
    CheckFinding,
    GateResult,
    GateRules,
    GateWaiver,
    MetricMeasurement,
    MetricSource,
    PromotionEvidence,
    parse_rule,
)
from falaj.records.names import ObjectId, new_id
from falaj.records.registry import ModelVersion
from falaj.registry import store as registry_store
from falaj.registry.cards.facts import FactReader, missing_facts
from falaj.registry.cards.markdown import model_card
from falaj.registry.dependencies import GateCheck
from falaj.registry.gates import store

CARD_COMPLETE = "card-complete"
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class PromotionGates:
    """The gates of aliases. `checks` are those that other services add, by name."""

    facts: FactReader
    checks: Mapping[str, GateCheck]
    version: Callable[[Transaction, ObjectId], ModelVersion]

    def results(self, call: Call, version: ModelVersion, alias: str) -> tuple[GateResult, ...]:
        """Return the result of every gate of `alias` for `version`."""
        rules = store.rules_of(call.tx, version.model, alias)
        found = [self._metric(call.tx, version, rules, each) for each in rules.metrics]
        found += [self._check(call.tx, version, name) for name in rules.checks]
        waivers = store.waivers_of(call.tx, version.id, alias)
        waived = {_outcome(each) for waiver in waivers for each in waiver.gates}
        return tuple(
            each.model_copy(update={"waived": True}) if _outcome(each) in waived else each for each in found
        )

    def require(self, call: Call, version: ModelVersion, alias: str) -> PromotionEvidence:
        """Return the evidence for `version`; raise Denied if a gate of `alias` refuses it."""
        results = self.results(call, version, alias)
        refusing = [each for each in results if each.refuses]
        if refusing:
            raise _refusal(version, alias, refusing)
        card = model_card(self.facts.read(call.tx, version))
        row = registry_store.version_row(call.tx, version.id)
        current = registry_store.version_at(call.tx, version.model, alias, at=None)
        waivers = store.waivers_of(call.tx, version.id, alias)
        return PromotionEvidence(
            manifest_sha256="" if row is None else sha256(row["manifest"].encode()).hexdigest(),
            card_sha256=card.sha256,
            label=version.label,
            metrics=version.metrics,
            missing=card.missing,
            current=None if current is None else objects.name_of(call.tx, current),
            gates=results,
            waivers=tuple(waivers) if any(each.waived for each in results) else (),
        )

    def set_rules(self, call: Call, model: ObjectId, rules: GateRules) -> GateRules:
        """Replace the gates of an alias."""
        known = sorted({CARD_COMPLETE, *self.checks})
        faults = [
            Fault(where="checks", given=name, allowed=", ".join(known), fix=f"--check {known[0]}")
            for name in rules.checks
            if name not in known
        ]
        if faults:
            raise InvalidInput("a check is not known", faults=faults)
        registry_store.lock_alias(call.tx, model, rules.alias)
        kept = {"metrics": tuple(dict.fromkeys(rules.metrics)), "checks": tuple(dict.fromkeys(rules.checks))}
        changed = rules.model_copy(update=kept)
        return store.set_rules(call.tx, model, changed, by=call.caller.id, at=call.now)

    def waive(self, call: Call, version: ModelVersion, alias: str, *, reason: str) -> GateWaiver:
        """Let `version` pass the gates of `alias` that it fails now."""
        registry_store.lock_alias(call.tx, version.model, alias)
        failing = tuple(each for each in self.results(call, version, alias) if each.refuses)
        if not failing:
            raise Conflict(f"{version.reference} fails no gate of {alias}: there is nothing to waive")
        ident = new_id("waiver")
        store.add_waiver(
            call.tx,
            ident,
            version=version.id,
            alias=alias,
            gates=failing,
            reason=reason,
            by=call.caller.id,
            at=call.now,
        )
        return next(each for each in store.waivers_of(call.tx, version.id, alias) if each.id == ident)

    def _check(self, tx: Transaction, version: ModelVersion, name: str) -> GateResult:
        if name == CARD_COMPLETE:
            found = self._card_complete(tx, version)
        elif name in self.checks:
            found = self.checks[name](tx, version)
        else:  # it was known when the gates were set: what is not there cannot pass
            found = CheckFinding(
                passed=False,
                value="no such check on this platform",
                allowed=", ".join(sorted({CARD_COMPLETE, *self.checks})),
                fix="falaj models set-gates, with the checks that there are",
            )
        return GateResult(gate=name, **found.model_dump())

    def _card_complete(self, tx: Transaction, version: ModelVersion) -> CheckFinding:
        missing = missing_facts(self.facts.read(tx, version))
        return CheckFinding(
            passed=not missing,
            value=f"without {', '.join(missing)}" if missing else "complete",
            allowed="a card with description, licence, metrics, origins, signature, packages and hardware",
            fix=f"register the version again with {', '.join(missing)}" if missing else "",
        )

    def _metric(self, tx: Transaction, version: ModelVersion, rules: GateRules, text: str) -> GateResult:
        """Return whether a metric of `version` keeps its bound; numbers are compared as they are written."""
        rule, data = parse_rule(text), rules.on
        on = "" if data is None else f" on {objects.name_of(tx, data)}"
        gate = f"{text}{on}{'' if rules.target is None else f', computed for {rules.target}'}"
        own = _find_metric(tx, version, rules, rule.metric)
        if own is None:
            return _unmeasured(tx, gate, version, rule.metric, rules)
        threshold, origin, sources = rule.bound, "", [own]
        if rule.alias is not None:
            pointed = registry_store.version_at(tx, version.model, rule.alias, at=None)
            if pointed is None:
                return _without_other(gate, version, rule.alias, first=rule.alias == rules.alias)
            other = self.version(tx, pointed)
            theirs = _find_metric(tx, other, rules, rule.metric)
            if theirs is None:
                return _unmeasured(tx, gate, other, rule.metric, rules)
            threshold = Decimal(repr(theirs.value)) + rule.bound
            origin = f": {rule.alias} is {other.reference} with {theirs.value!r}"
            sources.append(theirs)
        found = Decimal(repr(own.value))
        passed = found >= threshold if rule.comparison == ">=" else found <= threshold
        better = "higher" if rule.comparison == ">=" else "lower"
        fix = "" if passed else f"promote a version whose {rule.metric} is {better}"
        return GateResult(
            gate=gate,
            passed=passed,
            value=f"{rule.metric} {own.value!r}",
            allowed=f"{rule.comparison} {threshold.normalize():f}{origin}",
            fix=fix,
            sources=tuple(sources),
        )


def record_metrics(
    call: Call, version: ModelVersion, data: ObjectId, metrics: Metrics, *, run: ObjectId | None
) -> MetricMeasurement:
    """Store metrics of `version` on a set; raise Conflict if one is there with another value."""
    if not metrics:
        raise InvalidInput.at("metrics", given="none", allowed="at least one metric")
    registry_store.lock_version(call.tx, version.id)
    known = store.measured(call.tx, version.id, data)
    name = objects.name_of(call.tx, data)
    if changed := sorted(each for each, value in metrics.items() if known.get(each, value) != value):
        raise Conflict(
            f"{changed[0]!r} of {version.reference} on {name} is {known[changed[0]]!r} already, and a measurement is "
            "never changed; register the model again if it was wrong"
        )
    new = {each: value for each, value in metrics.items() if each not in known}
    if new:
        store.add_measurement(call.tx, version.id, data, new, run=run, by=call.caller.id, at=call.now)
    return MetricMeasurement(
        version=version.reference, on=name, metrics=dict(metrics), run=run, by=call.caller.name, at=call.now
    )


def _find_metric(
    tx: Transaction, version: ModelVersion, rules: GateRules, metric: str
) -> MetricSource | None:
    """Return a metric of a version as the gates want it: computed or reported on their set, or registered."""
    if rules.on is None:
        if metric not in version.metrics:
            return None
        author = objects.name_of(tx, version.author)
        told = {
            "value": version.metrics[metric],
            "origin": "registered",
            "by": author,
            "at": version.created_at,
        }
        return MetricSource.model_validate({"version": version.reference, "metric": metric, **told})
    for each in _measured(tx, version, rules):
        if metric in each.metrics:
            return MetricSource(
                version=version.reference,
                metric=metric,
                value=each.metrics[metric],
                origin=each.origin,
                by=each.by,
                at=each.at,
                job=each.job,
                rows=each.rows,
                seen=version.training_set == rules.on,
            )
    return None


def _measured(tx: Transaction, version: ModelVersion, rules: GateRules) -> list[MetricMeasurement]:
    """Return the measurements that count: with a target those that were computed for it, else those reported."""
    found = store.measurements_of(tx, version.id)
    return [each for each in found if (each.on, each.target) == (rules.on, rules.target)]


def _unmeasured(
    tx: Transaction, gate: str, version: ModelVersion, metric: str, rules: GateRules
) -> GateResult:
    """The result where `version`, the one to promote or the one to compare with, does not have the metric."""
    data = rules.on
    found = [version.metrics] if data is None else [each.metrics for each in _measured(tx, version, rules)]
    known = sorted({name for each in found for name in each})
    has = f"; it has {', '.join(known[:10])}" if known else ""
    computed = "" if rules.target is None else "computed "
    if data is None:
        fix = f"register the version again with the metric {metric}, or set gates with a measured set (--on)"
    elif rules.target is None:
        fix = f"falaj models record-metrics {version.reference} --on {objects.name_of(tx, data)}"
        fix += f" --metrics '{{\"{metric}\": VALUE}}'"
    else:
        fix = f"falaj models evaluate {version.reference} --on {objects.name_of(tx, data)} --target {rules.target}"
    value = f"{version.reference} has no {computed}{metric}{has}"
    allowed = f"a {computed or 'measured '}{metric}"
    return GateResult(gate=gate, passed=False, value=value, allowed=allowed, fix=fix)


def _outcome(found: GateResult) -> GateResult:
    """Return a result without who measured it: a waiver holds for what was found."""
    return found.model_copy(update={"waived": False, "sources": ()})


def _without_other(gate: str, version: ModelVersion, alias: str, *, first: bool) -> GateResult:
    """The result where there is no version to compare with: the `first` one of the alias itself passes."""
    fix = "" if first else f"falaj models promote VERSION --to {alias}, or set gates that name another alias"
    value = f"{version.name} has no {alias}{' yet' * first}"
    return GateResult(gate=gate, passed=first, value=value, allowed=f"a version of {alias}", fix=fix)


def _refusal(version: ModelVersion, alias: str, refusing: list[GateResult]) -> Denied:
    faults = [
        Fault(where=f"gate {each.gate}", given=each.value, allowed=each.allowed, fix=each.fix or None)
        for each in refusing
    ]
    first = refusing[0]
    more = f", and {len(refusing) - 1} more" if len(refusing) > 1 else ""
    waive = f"falaj models waive-gates {version.reference} --alias {alias} --reason TEXT"
    return Denied(
        f"a gate of {alias} refuses {version.reference}: {first.gate}: {first.value}, allowed is {first.allowed}{more}",
        faults=faults,
        details={
            "rule": "registry.gate",
            "needs": f"gates that pass, or an administrator who waives them: {waive}",
            "gates": [each.gate for each in refusing],
        },
    )
