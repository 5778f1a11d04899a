"""Gates of aliases: the rules that a version must meet, their results, and the evidence that is kept of them."""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, FiniteFloat, StringConstraints

from falaj.records.governance.residency import Label
from falaj.records.names import Name, ObjectId, TextRule
from falaj.records.record import Record

_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,15})?(?:[eE][+-]?[0-9]{1,2})?"
_METRIC = r"[A-Za-z_][\w./:@-]{0,200}"
_RULE = (
    rf"(?P<metric>{_METRIC})\s{{0,9}}(?P<comparison>>=|<=)\s{{0,9}}"
    rf"(?:(?P<bound>[+-]?{_NUMBER})"
    rf"|(?P<alias>[a-z][a-z0-9]*(?:\.[a-z0-9]+)*)(?:\s{{0,9}}(?P<sign>[+-])\s{{0,9}}(?P<margin>{_NUMBER}))?)"
)

MetricRule = Annotated[
    str,
    TextRule(
        re.sub(r"\?P<\w+>", "?:", _RULE),
        "a rule is METRIC >= or <= a number, or the value of an alias: 'auc >= 0.9', 'auc >= champion - 0.002'",
        limit=300,
    ),
]
MetricRules = Annotated[tuple[MetricRule, ...], Field(max_length=100)]
CheckNames = Annotated[tuple[Name, ...], Field(max_length=100)]
Reason = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000)]


class ParsedRule(NamedTuple):
    """A rule of a metric: `bound` is the number, or what is added to the value of the version of `alias`."""

    metric: str
    comparison: Literal[">=", "<="]
    alias: str | None
    bound: Decimal


def parse_rule(text: str) -> ParsedRule:
    """Return the parts of a MetricRule."""
    found = re.fullmatch(_RULE, text)
    if found is None:
        raise ValueError(f"{text!r} is not a rule of a metric")
    comparison: Literal[">=", "<="] = ">=" if found["comparison"] == ">=" else "<="
    if found["alias"] is None:
        return ParsedRule(found["metric"], comparison, None, Decimal(found["bound"]))
    margin = Decimal(f"{found['sign'] or '+'}{found['margin'] or 0}")
    return ParsedRule(found["metric"], comparison, found["alias"], margin)


class GateRules(Record):
    """The gates of an alias: rules of metrics, measured `on` a pinned training set, and checks by name.

    Without `on`, the metrics are those that versions were registered with. With `target`, only metrics count that the
    platform computed itself, by predicting that column of the set. `seq` counts the changes of the rules.
    """

    alias: str
    metrics: MetricRules = ()
    on: ObjectId | None = None
    target: str | None = None
    checks: CheckNames = ()
    seq: int = 0
    by: str | None = None
    at: datetime | None = None


class CheckFinding(Record):
    """The answer of a check: whether a version passes, the value that was found, what is allowed, and the fix."""

    passed: bool
    value: str = ""
    allowed: str = ""
    fix: str = ""


MetricOrigin = Literal["computed", "reported", "registered"]
"""Computed by a job of the platform on the pinned set; reported for that set; or given when it was registered."""


class MetricSource(Record):
    """A metric that a gate looked at: whose it is, and who says so. A `job` computed it, over `rows` of the set."""

    version: str
    metric: str
    value: float
    origin: MetricOrigin
    by: str
    at: datetime
    job: ObjectId | None = None
    rows: int | None = None
    seen: bool = False
    """The version was trained on the set."""

    def describe(self) -> str:
        told = f"{self.metric} {self.value!r} of {self.version} was {self.origin}"
        how = f" by {self.by}" if self.job is None else f" by {self.job} over {self.rows} rows, for {self.by}"
        return f"{told}{how}{', on the set that it was trained on' if self.seen else ''}"


class GateResult(Record):
    """One gate, and whether a version passes it. A `waived` one did not, and does not refuse.

    `sources` are the metrics that it looked at: the version's own, and that of the version which it is compared with.
    """

    gate: str
    passed: bool
    value: str = ""
    allowed: str = ""
    fix: str = ""
    waived: bool = False
    sources: tuple[MetricSource, ...] = ()

    @property
    def refuses(self) -> bool:
        return not self.passed and not self.waived


class GateCheckReport(Record):
    """The results of the gates of an alias for a version, now."""

    version: str
    alias: str
    passed: bool
    results: tuple[GateResult, ...]


class GateWaiver(Record):
    """An administrator lets a version pass gates that it fails: for one alias, for a reason, and for these results."""

    id: ObjectId
    version: str
    alias: str
    gates: tuple[GateResult, ...]
    reason: str
    by: str
    at: datetime


class PromotionEvidence(Record):
    """What was known of a version when it was approved or promoted.

    `manifest_sha256` is the digest of its signed manifest, which never changes; `card_sha256` that of its model card as
    it was shown to the person who decided; `current` the version that the alias pointed at.
    """

    manifest_sha256: str
    card_sha256: str
    label: Label
    metrics: dict[str, float] = {}
    missing: tuple[str, ...] = ()
    current: str | None = None
    gates: tuple[GateResult, ...] = ()
    waivers: tuple[GateWaiver, ...] = ()
    approved_by: tuple[str, ...] = ()


class MetricMeasurement(Record):
    """Metrics of a version on a pinned training set. A measurement is never changed.

    Those that the platform computed name the `job`, the column `target` that was predicted by `output` of the model,
    and over how many `rows`; `by` is who asked for it. Otherwise `by` reported them.
    """

    version: str
    on: str
    metrics: dict[str, float]
    run: ObjectId | None = None
    job: ObjectId | None = None
    target: str | None = None
    output: str | None = None
    rows: int | None = None
    skipped: int | None = None
    by: str
    at: datetime

    @property
    def origin(self) -> MetricOrigin:
        return "reported" if self.job is None else "computed"


class EvaluationReport(Record):
    """What a job computed: the metrics of `output` of a model, as predictions of the column `target`.

    `skipped` rows had no target.
    """

    target: Annotated[str, Field(min_length=1, max_length=256)]
    output: Annotated[str, Field(min_length=1, max_length=256)]
    metrics: Annotated[dict[str, FiniteFloat], Field(min_length=1, max_length=100)]
    rows: Annotated[int, Field(ge=1)]
    skipped: Annotated[int, Field(ge=0)] = 0
