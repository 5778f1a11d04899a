"""Reads a job from a YAML file, with the line of each fault, and writes it so that it can be read again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from falaj.errors import Fault
from falaj.records.scheduling.snapshot import WHOLE_GPU, Affinity
from falaj.records.sizes import spell_size
from falaj.records.training.jobs import JobSpec
from falaj.sdk.definition_files.yaml_lines import YamlDocument, read_yaml
from falaj.sdk.job_fields import SYNONYMS
from falaj.sdk.job_request import JobRequest, parse_job_request

_SPELLED = {plain: spelled for spelled, plain in SYNONYMS.items()}


def read_job(path: str | Path, *, needs_script: bool = True) -> JobRequest:
    """Return the request in a file; a required script is in the same folder. Faults in fields are in the request."""
    document = read_yaml(Path(path))
    form = parse_job_request(_with_texts(document), place=document.place)
    if "script" not in form.values or not needs_script:
        return form
    script = Path(path).parent / form.values["script"]
    if os.path.isfile(script):  # a name that no file can have is none
        return JobRequest(form.values | {"script": script}, form.places, form.faults)
    fault = Fault(
        where=form.where(("script",)),
        given=str(form.values["script"]),
        allowed=f"a Python script that is there, seen from {Path(path).parent}",
    )
    return JobRequest(form.values | {"script": script}, form.places, (*form.faults, fault))


def spell_job(spec: JobSpec, *, script: str | Path) -> str:
    """Return `spec` as YAML for `falaj train --file`, without default values."""
    given = spec.model_dump(
        exclude_defaults=True, exclude={"script", "origin", "estimate", "affinity", "processes_min"}
    )
    fields: dict[str, Any] = {"script": str(script)}
    for name, value in given.items():
        fields[_SPELLED.get(name, name)] = _spelled(name, value)
    if spec.processes_min is not None:
        fields["processes"] = f"{spec.processes_min}:{spec.processes}"
    if spec.affinity != Affinity():
        inner = spec.affinity.model_dump(exclude_defaults=True)
        fields["affinity"] = {name: _spelled(name, value) for name, value in inner.items()}
    text: str = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=100)
    return text


def _with_texts(document: YamlDocument) -> dict[str, Any]:
    """Return the values of a document, with arguments and variables as the text in the file."""
    values = dict(document.values)
    if isinstance(words := values.get("args"), list):
        values["args"] = [document.texts.get(("args", str(n)), word) for n, word in enumerate(words)]
    if isinstance(variables := values.get("env"), Mapping):
        values["env"] = {
            name: value if value is None else document.texts.get(("env", name), value)
            for name, value in variables.items()
        }
    return values


def _spelled(name: str, value: Any) -> Any:
    if name == "gpu_milli":
        return value / WHOLE_GPU
    if name.endswith("_bytes"):
        return spell_size(value)
    if isinstance(value, timedelta):
        return _length_of_time(value)
    if isinstance(value, frozenset | set):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value


def _length_of_time(value: timedelta) -> str:
    seconds = value.total_seconds()
    for length, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds % length == 0:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds)}s" if seconds == int(seconds) else f"PT{seconds}S"
