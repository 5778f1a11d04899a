"""The last part of the demonstration: lineage of a prediction, residency refusals, and audit log verification."""

from __future__ import annotations

import json
import time

from stage import figure, refused, say, step

import falaj as fj

SHOWN = ("model_version", "run", "job", "dataset", "view")
"""Kinds of objects in the printed lineage; blobs and operations between them are left out."""


def show_evidence(platform: fj.Platform, prediction: str) -> None:
    lineage(platform, prediction)
    residency(platform)
    audit(platform)


def lineage(platform: fj.Platform, prediction: str) -> None:
    step(
        "The lineage of one prediction",
        f"falaj endpoints prediction {prediction}",
        "falaj lineage show … --direction up",
    )
    record = platform.endpoints.prediction(prediction)
    chance = next(iter(record.outputs.values()))
    say(f"{record.model}@{record.version} answered {record.caller} {chance}; it came true: {record.label}")
    say(f"predictions {prediction.rpartition('-')[0]}")
    for node in platform.lineage.graph(f"model_version:{record.model}@{record.version}", direction="up"):
        if node.kind in SHOWN:
            say(f"{'  ' * (1 - node.depth // 2)}{node.kind} {node.name}")


def residency(platform: fj.Platform) -> None:
    blob = platform.models.version("flight-delays@1").files[0].blob
    step(
        "The flights may not leave AE, so neither may the model that came from them",
        f"falaj blobs copy {blob} frankfurt --name abroad",
    )
    refused(lambda: platform.blobs.copy(blob, "frankfurt", name="abroad"))


def audit(platform: fj.Platform) -> None:
    step(
        "The audit log, checked offline with the public key alone",
        "falaj audit export log.jsonl && falaj audit verify log.jsonl",
    )
    lines = [line.model_dump_json(exclude_none=True) for line in platform.audit.export()]
    public = bytes.fromhex(platform.audit.key().ed25519)
    began = time.perf_counter()
    report = fj.verify_export(lines, public)
    took = time.perf_counter() - began
    if not report.ok:
        raise SystemExit(f"the audit log does not verify: {report.problems}")
    say(f"sound: {report.entries:,} entries under {report.heads} signed heads")
    figure("audit entries checked offline", f"{report.entries:,} in {took:.1f} s")
    place, entry = next((n, json.loads(t)) for n, t in enumerate(lines) if '"outcome":"denied"' in t)
    entry["entry"]["outcome"] = "done"
    lines[place] = json.dumps(entry)
    say(f"with one denial rewritten: {fj.verify_export(lines, public).problems[0]}")
