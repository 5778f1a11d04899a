"""Renders a model card as Markdown that stays harmless as HTML, whatever the facts say. Pure.

Every value is escaped: neither its Markdown nor its HTML has an effect. What the author wrote keeps its Markdown, but
stands in a quotation, so that it cannot pass for a fact, and without HTML and links that run code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256

from falaj.records.models.cards import CardFacts, ModelCard, OriginObject
from falaj.records.models.gates import MetricMeasurement
from falaj.records.registry import TensorSpec
from falaj.records.sizes import format_size
from falaj.registry.cards.facts import missing_facts

MOST_ROWS = 200
"""Rows of one table; what is beyond is counted. All of it is in the JSON and in the bill of materials."""
LONGEST_VALUE = 300

_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~-])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_LINE_ENDS = re.compile(r"\r\n|[\r\n\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_ACTIVE_SCHEME = re.compile(r"(?i)\b(javascript|vbscript|livescript|data|file)(\s*)(\\?:)")


def model_card(facts: CardFacts) -> ModelCard:
    """Return the card of a version."""
    missing = missing_facts(facts)
    markdown = "\n".join(_lines(facts, missing)) + "\n"
    digest = sha256(markdown.encode(errors="replace")).hexdigest()
    return ModelCard(facts=facts, missing=missing, markdown=markdown, sha256=digest)


def escaped(value: object, *, limit: int = LONGEST_VALUE) -> str:
    """Return a value as one line of Markdown that shows it as it is."""
    text = value if isinstance(value, str) else str(value)
    text = text if len(text) <= limit else f"{text[:limit]}…"
    plain = "".join(each if each.isprintable() else " " for each in text)
    plain = _ACTIVE_SCHEME.sub(r"\1 \3", plain)
    return _SPECIAL.sub(r"\\\1", re.sub("[&<>]", lambda found: _ENTITIES[found[0]], plain))


def quoted(text: str) -> Iterator[str]:
    """Yield what an author wrote as the lines of a quotation."""
    for line in _LINE_ENDS.split(text.strip()):
        safe = "".join(each if each.isprintable() or each == "\t" else " " for each in line)
        safe = re.sub("[&<]", lambda found: _ENTITIES[found[0]], safe)
        yield f"> {_ACTIVE_SCHEME.sub(_separate, safe)}".rstrip()


def _separate(found: re.Match[str]) -> str:
    """A space before the colon: no link then, nor a scheme."""
    return f"{found[1]} :"


def _lines(facts: CardFacts, missing: Sequence[str]) -> Iterator[str]:
    yield f"# {escaped(facts.version)}"
    yield ""
    yield from _table(("fact", "value"), _summary(facts))
    if missing:
        yield from ("", f"Missing: {', '.join(map(escaped, missing))}.")
    yield from ("", "## Description by the author", "")
    yield from quoted(facts.text) if facts.text.strip() else ("None was written.",)
    yield from _section("Metrics", ("metric", "value"), sorted(facts.metrics.items()))
    for each in facts.measurements:
        yield from _section(_measured(each), ("metric", "value"), sorted(each.metrics.items()))
    tensors = [("input", each) for each in facts.inputs] + [("output", each) for each in facts.outputs]
    heads = ("direction", "name", "type", "shape", "columns")
    yield from _section("Signature", heads, (_tensor(*each) for each in tensors))
    yield from _section("Parameters of the run", ("parameter", "value"), sorted(facts.params.items()))
    files = ((each.path, each.format, format_size(each.size_bytes), each.sha256) for each in facts.files)
    yield from _section("Files", ("file", "format", "size", "SHA-256"), files)
    environment: Mapping[str, str] = facts.environment
    yield from _section("Environment", ("name", "value"), sorted(environment.items()))
    packages = ((each.name, each.version) for each in facts.packages)
    yield from _section("Packages", ("package", "version"), packages)


def _measured(found: MetricMeasurement) -> str:
    if found.job is None:
        return f"Metrics on {found.on}, reported by {found.by}"
    return f"Metrics on {found.on}, computed for {found.target} over {found.rows} rows"


def _summary(facts: CardFacts) -> Iterator[tuple[str, object]]:
    yield "format", facts.format.value
    yield "size", format_size(facts.size_bytes)
    yield "licence", facts.licence or "not stated"
    yield "author", facts.author
    yield "created", facts.created_at.isoformat(timespec="seconds")
    yield "training set", _origin(facts.training_set)
    yield "run", _origin(facts.run)
    if facts.sources:
        yield "made from", ", ".join(_origin(each) for each in facts.sources)
    yield "hardware", "not known" if facts.hardware is None else facts.hardware.describe() or "not known"
    yield "residency", f"{facts.label.describe()}; stored in {facts.zone or 'the default zone'}"
    yield "input example", facts.example or "none"
    if facts.code is not None:
        yield "code", facts.code.describe()
    yield "signed by", f"key {facts.key}"
    yield "id", facts.id


def _origin(found: OriginObject | None) -> str:
    if found is None:
        return "none"
    return f"{found.name} ({found.id})" if found.name and found.name != found.id else str(found.id)


def _tensor(direction: str, spec: TensorSpec) -> tuple[object, ...]:
    shape = " × ".join("any" if size < 0 else str(size) for size in spec.shape) or "-"
    return direction, spec.name, spec.dtype, shape, ", ".join(spec.features) or "-"


def _section(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    found = list(rows)
    if found:
        yield from ("", f"## {escaped(title)}", "")
        yield from _table(heads, found)


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    found = list(rows)
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in found[:MOST_ROWS]:
        yield f"| {' | '.join(escaped(cell) for cell in row)} |"
    if len(found) > MOST_ROWS:
        yield f"| … {len(found) - MOST_ROWS} more |{' |' * (len(heads) - 1)}"
