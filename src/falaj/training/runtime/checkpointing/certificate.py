"""The certificate of a run: the samples it used, its interruptions, and whether recomputed losses were equal.

The ledger can be recomputed from (samples, batch_size, seed, drop_last, steps) alone. The digest detects accidental
changes; protection against forgery comes from the platform, which stores the certificate as an artifact of the run:
hashed, encrypted, and writable by no one else.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from falaj.training.runtime.agent.agents import read_metrics
from falaj.training.runtime.agent.job import job
from falaj.training.runtime.agent.run_files import replace_file
from falaj.training.runtime.checkpointing.position import ADDRESSING, Facts
from falaj.training.runtime.checkpointing.resume_history import ResumeHistory, ResumeRecord
from falaj.training.runtime.checkpointing.sample_ledger import expected_head
from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.errors import CertificateInvalid, TrainingFault
from falaj.training.runtime.parallel.process_group import ProcessGroup

FILE = "certificate.json"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The verified facts of a run after `steps` steps."""

    steps: int
    ledger: str
    """The head of the hash chain over the samples of all the steps."""
    is_ledger_right: bool | None
    """Whether the ledger equals the recomputed one; None where it was not checked."""
    asked_exact: bool
    exact: bool
    """Whether exactness was requested and no violation was found."""
    largest_difference: float
    """The largest difference between two losses of one step, over all recomputed steps."""
    compared: int
    """The number of logged losses that were compared."""
    changed: tuple[str, ...]
    """Descriptions of facts that were not equal for all steps."""
    resumes: tuple[ResumeRecord, ...]
    layout: str
    """The process layout at the end."""
    facts: Facts
    """The facts that must be equal for a run to be bitwise equal."""
    unread: tuple[str, ...] = ()
    """Descriptions of earlier records that could not be read and compared."""

    @property
    def kill_points(self) -> tuple[ResumeRecord, ...]:
        """The resumes after an attempt that was interrupted."""
        return tuple(each for each in self.resumes if each.killed)


def certify(resume_history: ResumeHistory, facts: Facts, *, steps: int, ledger: str) -> Certificate:
    """Return the certificate of the run so far. For exact runs the ledger is recomputed, which takes a while."""
    asked = bool(facts["exact"])
    is_right = ledger_head(facts, steps) == ledger if asked else None
    return Certificate(
        steps=steps,
        ledger=ledger,
        is_ledger_right=is_right,
        asked_exact=asked,
        exact=bool(is_right) and not resume_history.difference and not resume_history.changed,
        largest_difference=resume_history.difference,
        compared=resume_history.compared,
        changed=resume_history.changed,
        resumes=tuple(resume_history.resumes),
        layout=resume_history.layout,
        facts=dict(facts),
        unread=resume_history.unread,
    )


def issue_certificate(
    resume_history: ResumeHistory,
    facts: Facts,
    world: ProcessGroup,
    *,
    steps: int,
    ledger: str,
    home: Path | None,
) -> Certificate:
    """Return the same certificate in all processes; for an exact run rank 0 writes it to the folder `home`."""
    own: bytearray | None = None
    if world.is_leader:
        made = certify(resume_history, facts, steps=steps, ledger=ledger)
        if made.asked_exact:
            publish(made, resume_history, home)
        if world.size == 1:
            return made
        own = bytearray(encode_certificate(made))
    shared = world.broadcast_bytes(own)
    return decode_certificate(shared or b"")


def publish(certificate: Certificate, resume_history: ResumeHistory, home: Path | None) -> None:
    """Write the certificate to the folder of the run, and report its outcome."""
    c = certificate
    if not c.exact:
        resume_history.notify(f"ERROR: this run is not exact: {'; '.join(violations(c))}")
    if home is None:
        return
    try:
        path = write_certificate(c, home)
    except OSError as error:
        resume_history.notify(f"the certificate could not be written: {error}")
        return
    if c.exact:
        again = f"{len(c.kill_points)} interruptions, {c.compared} recomputed losses equal"
        but = f"; {', '.join(c.unread)} could not be read and compared" if c.unread else ""
        resume_history.notify(f"exact: {c.steps} steps, {again}{but}; see {path}")


def violations(certificate: Certificate) -> Iterator[str]:
    """Yield the reasons why a run is not exact."""
    if not certificate.is_ledger_right:
        yield "the ledger does not match the batches"
    if certificate.largest_difference:
        yield f"losses of the same step differ by up to {certificate.largest_difference:g}"
    yield from (f"changed during the run: {change}" for change in certificate.changed)


def output_folder(run: object) -> Path | None:
    """Return the folder of a run, or the outputs of the job; None where the run is not stored."""
    if isinstance(run, str | Path):
        return Path(run)
    return job.outputs if run is None and os.environ.get("FALAJ_OUTPUTS") else None


def ledger_head(facts: Facts, steps: int) -> str:
    """Return the head of the ledger after `steps` steps by the facts."""
    plan = BatchPlan(**{name: facts[name] for name in ADDRESSING})  # type: ignore[arg-type]
    return expected_head(plan, steps)


def encode_certificate(certificate: Certificate) -> bytes:
    """Return the certificate as JSON with a digest."""
    said = {"version": VERSION, **asdict(certificate)}
    return json.dumps(said | {"sha256": digest(said)}, indent=2, ensure_ascii=False).encode()


def decode_certificate(data: bytes | bytearray) -> Certificate:
    """Return the certificate in `data`; raise CertificateInvalid if it is malformed or changed."""
    try:
        said = json.loads(data)
        given, version = said.pop("sha256"), said["version"]
        known = {field.name: said[field.name] for field in fields(Certificate) if field.name in said}
        found = Certificate(**known)
        resumes = tuple(ResumeRecord(**each) for each in said["resumes"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CertificateInvalid(f"this is not a certificate: {error!r}") from error
    if version != VERSION:
        fault = TrainingFault("version", version, str(VERSION))
        raise CertificateInvalid("the certificate is of another version", faults=[fault])
    if given != digest(said):
        fault = TrainingFault("sha256", given, digest(said))
        raise CertificateInvalid("the certificate was changed after it was written", faults=[fault])
    return replace(found, resumes=resumes, changed=tuple(found.changed), unread=tuple(found.unread))


def digest(said: Mapping[str, Any]) -> str:
    return sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def write_certificate(certificate: Certificate, folder: Path) -> Path:
    """Write the certificate to `folder` atomically."""
    path = folder / FILE
    replace_file(path, encode_certificate(certificate))
    return path


def verify_certificate(
    path: str | Path,
    *,
    samples: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    steps: int | None = None,
    drop_last: bool | None = None,
    run: str | Path | None = None,
) -> Certificate:
    """Return the certificate at `path` after recomputing all of it; raise CertificateInvalid where it does not hold.

    The given batch parameters must be those of the certificate. With `run`, the folder of a run without a platform,
    the losses are compared with those logged there. Whether the run was exact is in `certificate.exact`.
    """
    path = Path(path)
    found = decode_certificate(path.read_bytes())
    given = {"samples": samples, "batch_size": batch_size, "seed": seed, "drop_last": drop_last}
    about: dict[str, Any] = {**found.facts, "steps": found.steps}
    faults = [
        TrainingFault(name, about.get(name), str(value))
        for name, value in {**given, "steps": steps}.items()
        if value is not None and about.get(name) != value
    ]
    faults += ledger_faults(found)
    if run is not None:
        faults += log_faults(found, Path(run))
    if faults:
        raise CertificateInvalid(f"{path} does not hold", faults=faults)
    return found


def ledger_faults(certificate: Certificate) -> Iterator[TrainingFault]:
    c = certificate
    missing = [name for name in (*ADDRESSING, "exact") if name not in c.facts]
    if missing:
        yield TrainingFault("facts", f"without {', '.join(missing)}")
        return
    expected = ledger_head(c.facts, c.steps)
    is_right = c.ledger == expected
    if not is_right and c.is_ledger_right is not False:
        yield TrainingFault("ledger", c.ledger, expected)
    if c.exact != (c.asked_exact and is_right and not c.largest_difference and not c.changed):
        yield TrainingFault("exact", c.exact, "the value that follows from the other fields")


def log_faults(certificate: Certificate, run: Path) -> Iterator[TrainingFault]:
    """Yield the contradictions between the certificate and the log of the run."""
    logged: dict[int, list[float]] = defaultdict(list)
    for metric in read_metrics(run):
        if metric.name == "loss" and metric.step <= certificate.steps:
            logged[metric.step].append(metric.value)
    lost = [step for step in range(1, certificate.steps + 1) if step not in logged]
    if lost:
        yield TrainingFault("metrics.jsonl", f"{len(lost)} steps without a loss, the first is {lost[0]}")
    apart = max((max(losses) - min(losses) for losses in logged.values()), default=0.0)
    if apart != certificate.largest_difference:
        yield TrainingFault(
            "largest_difference", certificate.largest_difference, f"{apart!r}, as it was logged"
        )
    again = sum(len(losses) - 1 for losses in logged.values())
    if again != certificate.compared:
        yield TrainingFault("compared", certificate.compared, f"{again}, as it was logged")
