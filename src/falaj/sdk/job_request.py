"""The request for a job, from options, Python or YAML, and the JobSpec that it becomes, or all its faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from os import PathLike
from typing import Any

from pydantic import ValidationError

from falaj.errors import Fault, InvalidInput, shorten
from falaj.governance.operations.operation import invalid
from falaj.records.training.jobs import JobSpec
from falaj.sdk.job_fields import ALIASES, FIELDS, FLAGS, GPU_FIELDS, MERGED, SYNONYMS, FieldFormatError

Location = tuple[str, ...]
OTHER_FIELDS = ("script", "workspace")
_OTHER_SPELLING = SYNONYMS | {plain: spelled for spelled, plain in SYNONYMS.items()}


@dataclass(frozen=True)
class JobRequest:
    """Fields by name, where each was given, and the faults in their values."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Location, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()

    def over(self, below: JobRequest) -> JobRequest:
        """Both; where both say something, this one counts."""
        hidden = {name for own in self.values for name in (own, _OTHER_SPELLING.get(own, own))}
        kept = {name: value for name, value in below.values.items() if name in MERGED or name not in hidden}
        merged = {
            name: {**kept[name], **value} if name in MERGED and name in kept else value
            for name, value in self.values.items()
        }
        places = {at: place for at, place in below.places.items() if at[0] in kept}
        return JobRequest(kept | merged, places | self.places, (*below.faults, *self.faults))

    def where(self, at: Location) -> str:
        """Where a field was given, or the nearest thing around it."""
        for length in range(len(at), 0, -1):
            if at[:length] in self.places:
                return self.places[at[:length]]
        return ".".join(at)


def parse_job_request(given: Mapping[str, Any], *, place: Callable[[Location], str]) -> JobRequest:
    """Return the request with the fields in `given`; `place` returns where a field was given, for its faults."""
    form, faults = JobRequest(), list[Fault]()
    for at, value in _flat(given):
        name = ALIASES.get(at[-1], at[-1])
        if name not in FIELDS and name not in OTHER_FIELDS:
            faults.append(_unknown(at, place(at)))
            continue
        if (name,) in form.places:
            faults.append(
                Fault(where=place(at), given=f"also {form.places[(name,)]}", allowed="one of the two")
            )
            continue
        form.places[(name,)] = place(at)
        try:
            form.values[name] = _read(name, value)
        except FieldFormatError as error:
            fix = _fix(place(at), at[-1], error.example)
            given_as = ", ".join(map(str, value)) if isinstance(value, list) else value
            fault = Fault(where=place(at), given=shorten(given_as), allowed=error.allowed, fix=fix)
            faults.append(fault)
        if isinstance(value, Mapping):
            form.places.update({(name, str(key)): place((*at, str(key))) for key in value})
    for spelled, plain in SYNONYMS.items():
        if spelled in form.values and plain in form.values:
            one = f"either {spelled} or {plain}"
            faults.append(Fault(where=form.where((plain,)), given=f"also {spelled}", allowed=one))
    return JobRequest(form.values, form.places, tuple(faults))


def build_spec(form: JobRequest, **fixed: Any) -> JobSpec:
    """Return the JobSpec of `form` with the `fixed` fields; raise InvalidInput with all faults."""
    fields, sources = _placed(form)
    faults = list(form.faults)
    spec = None
    try:
        spec = JobSpec.model_validate(fixed | fields)
        faults += _impossible(spec, form)
    except ValidationError as error:
        faults += [_as_given(fault, form, sources) for fault in invalid("job", error).faults]
    if faults or spec is None:
        raise invalid_request(faults)
    return spec


def invalid_request(faults: Iterable[Fault]) -> InvalidInput:
    found = sorted(faults, key=lambda fault: _line(fault.where))
    what = f"{found[0].where} is" if len(found) == 1 else f"{len(found)} values are"
    return InvalidInput(f"the job cannot be submitted: {what} not valid", faults=found)


def _flat(given: Mapping[str, Any]) -> Iterable[tuple[Location, Any]]:
    """Yield every field with its location; those of `affinity` may be nested."""
    for name, value in given.items():
        if name == "affinity" and isinstance(value, Mapping):
            yield from (((name, str(inner)), each) for inner, each in value.items())
        else:
            yield (str(name),), value


def _read(name: str, value: Any) -> Any:
    if value is None:
        raise FieldFormatError("a value; a field without one is left out", "…")
    if isinstance(value, bool) and name not in FLAGS:
        value = str(value).lower()  # no number is meant by it
    if name in OTHER_FIELDS:
        if not isinstance(value, str | PathLike):
            raise FieldFormatError(f"the {name}, a word", "default" if name == "workspace" else "train.py")
        return value
    return FIELDS[name].read(value)


def _placed(form: JobRequest) -> tuple[dict[str, Any], dict[Location, str]]:
    """Return the fields of JobSpec, and the given field that each path came from."""
    fields: dict[str, Any] = {}
    sources: dict[Location, str] = {}
    for name, value in form.values.items():
        if name in OTHER_FIELDS:
            continue
        *outer, last = FIELDS[name].path
        inside = fields.setdefault(outer[0], {}) if outer else fields
        sources[FIELDS[name].path] = name
        if name == "processes" and isinstance(value, tuple):
            fields["processes_min"], fields["processes"] = value
            sources[("processes_min",)] = name
        else:
            inside[last] = value
    if "gpus" not in fields and any(name in form.values for name in GPU_FIELDS):
        fields["gpus"] = 1
    if "processes" not in fields and (total := _sum_of(fields.get("roles"))):
        nodes = str(fields.get("nodes", 1))
        fields["processes"] = -(-total // int(nodes)) if nodes.isdecimal() and int(nodes) else total
    return fields, sources


def _sum_of(roles: Any) -> int:
    """Return the total processes of the roles; 0 where they are not counts, which is a fault of its own."""
    counts = list(roles.values()) if isinstance(roles, Mapping) else []
    return sum(counts) if all(isinstance(each, int) and each >= 0 for each in counts) else 0


def _impossible(spec: JobSpec, form: JobRequest) -> list[Fault]:
    """Return the faults in combinations of fields that JobSpec does not check."""
    if spec.gpu_memory_bytes is None or spec.gpus:
        return []
    return [Fault(where=form.where(("gpu_memory",)), given="0 GPUs", allowed="at least 1 GPU with it")]


def _as_given(fault: Fault, form: JobRequest, sources: Mapping[Location, str]) -> Fault:
    """Return `fault` with the location where its field was given."""
    at = tuple(part for part in fault.where.split(".") if part != "[key]")
    for length in range(len(at), 0, -1):
        if at[:length] in sources:
            at = (sources[at[:length]], *at[length:])
            break
    where = "the job" if at == ("body",) else form.where(at)
    given = None if at == ("body",) else fault.given
    return fault.model_copy(update={"where": where, "given": given})


def _unknown(at: Location, where: str) -> Fault:
    known = sorted({*FIELDS, *OTHER_FIELDS} - {*SYNONYMS.values(), "processes_min"})
    near = get_close_matches(at[-1], [*known, *ALIASES], n=1, cutoff=0.7)
    fix = f"{near[0]}, if that is meant" if near else "remove this field"
    return Fault(where=where, given=at[-1], allowed=f"one of {', '.join(known)}", fix=fix)


def _fix(where: str, name: str, example: str) -> str | None:
    if example == "…":
        return None
    if where.startswith("--"):
        return f"{where} {example}"
    return f"{name}: {example}" if ":" in where else f'{name}="{example}"'


def _line(where: str) -> tuple[str, int]:
    """Return the sort key of a location, so that the faults of a file are in its order."""
    path, _, rest = where.partition(" ")[0].rpartition(":")
    return (path, int(rest)) if rest.isdecimal() else ("", 0)
