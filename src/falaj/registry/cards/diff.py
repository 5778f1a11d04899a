"""Compares two versions in all that is known of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import unified_diff

from falaj.records.models.cards import CardFacts, FactChange, MetricChange, OriginObject, VersionDiff
from falaj.records.models.facts import PackagePin
from falaj.records.registry import ModelFile, TensorSpec
from falaj.records.sizes import format_size

MOST_CARD_LINES = 2000
"""Of a longer text it is told that it differs, not where: the comparison takes quadratic time at worst."""


def diff_versions(before: CardFacts, after: CardFacts) -> VersionDiff:
    """Return what differs between two versions, and the metrics of both."""
    return VersionDiff(
        before=before.version,
        after=after.version,
        facts=_changes(_facts(before), _facts(after)),
        files=_changes(_files(before.files), _files(after.files)),
        signature=_changes(_signature(before), _signature(after)),
        metrics=_metrics(before, after),
        params=_changes(before.params, after.params),
        packages=_changes(_packages(before.packages), _packages(after.packages)),
        environment=_changes(before.environment, after.environment),
        card=_card(before.text, after.text),
    )


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[FactChange, ...]:
    return tuple(
        FactChange(name=name, before=before.get(name), after=after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    )


def _facts(facts: CardFacts) -> dict[str, str]:
    stated = {
        "format": facts.format.value,
        "size": format_size(facts.size_bytes),
        "licence": facts.licence,
        "author": facts.author,
        "training set": _origin(facts.training_set),
        "run": _origin(facts.run),
        "made from": ", ".join(filter(None, map(_origin, facts.sources))),
        "hardware": None if facts.hardware is None else facts.hardware.describe(),
        "residency": facts.label.describe(),
        "zone": facts.zone,
        "input example": facts.example,
        "code": None if facts.code is None else facts.code.describe(),
        "signed by": facts.key,
    }
    return {name: value for name, value in stated.items() if value}


def _origin(found: OriginObject | None) -> str | None:
    return None if found is None else found.name or found.id


def _files(files: tuple[ModelFile, ...]) -> dict[str, str]:
    return {
        each.path: f"{each.format.value}, {each.size_bytes} bytes, sha256 {each.sha256}" for each in files
    }


def _signature(facts: CardFacts) -> dict[str, str]:
    both = (("input", facts.inputs), ("output", facts.outputs))
    return {f"{kind} {each.name}": _tensor(each) for kind, specs in both for each in specs}


def _tensor(spec: TensorSpec) -> str:
    shape = ", ".join("any" if size < 0 else str(size) for size in spec.shape)
    columns = f" of {', '.join(spec.features)}" if spec.features else ""
    return f"{spec.dtype}[{shape}]{columns}"


def _metrics(before: CardFacts, after: CardFacts) -> tuple[MetricChange, ...]:
    first, second = _measured(before), _measured(after)
    return tuple(
        MetricChange(
            name=name,
            before=first.get(name),
            after=second.get(name),
            difference=second[name] - first[name] if name in first and name in second else None,
        )
        for name in sorted({*first, *second})
    )


def _measured(facts: CardFacts) -> dict[str, float]:
    on = {
        f"{name} on {each.on}{'' if each.job is None else f', computed for {each.target}'}": value
        for each in facts.measurements
        for name, value in each.metrics.items()
    }
    return facts.metrics | on


def _packages(packages: tuple[PackagePin, ...]) -> dict[str, str]:
    """Return the version of each package; its hashes too, as one of the same version may have other files."""
    return {
        each.name.lower().replace("_", "-"): " ".join(
            filter(None, [each.version, _short(each.sha256), _short(each.files_sha256)])
        )
        for each in packages
    }


def _short(digest: str | None) -> str | None:
    return None if digest is None else f"sha256:{digest[:16]}"


def _card(before: str, after: str) -> tuple[str, ...]:
    if before == after:
        return ()
    first, second = before.splitlines(), after.splitlines()
    if max(len(first), len(second)) > MOST_CARD_LINES:
        return (f"the text differs: {len(first)} lines before, {len(second)} after",)
    return tuple(unified_diff(first, second, "before", "after", lineterm=""))
