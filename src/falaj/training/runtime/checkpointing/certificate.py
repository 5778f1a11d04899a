"""The certificate of a run: which samples it saw, what it survived, and whether what it computed twice was equal.

Its ledger can be worked out again from (samples, batch_size, seed, drop_last, steps) alone. The digest finds a slip or
a careless change; against a forger it is the platform that stands, which keeps the certificate as an artifact of the
run: hashed, encrypted, and written by nobody else.
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
    """What is certain of a run after `steps` steps."""

    steps: int
    ledger: str
    """The head of the hash chain over the samples of all the steps."""
    is_ledger_right: bool | None
    """Whether that is what the batches give, worked out again from nothing; none where nobody asked for it."""
    asked_exact: bool
    exact: bool
    """Whether it was asked to be exact, and nothing is known that says it was not."""
    largest_difference: float
    """Between two losses of one step, over all that was computed again."""
    compared: int
    """How many logged losses there were to compare with."""
    changed: tuple[str, ...]
    """Facts that were not the same for all the steps, in words: some were computed in another way than others."""
    resumes: tuple[ResumeRecord, ...]
    layout: str
    """The processes at the end."""
    facts: Facts
    """What must be the same for a run to be the same to the bit."""
    unread: tuple[str, ...] = ()
    """What was logged before but could not be read, and so not be compared with, in words."""

    @property
    def kill_points(self) -> tuple[ResumeRecord, ...]:
        """The resumes after an attempt that was broken off."""
        return tuple(each for each in self.resumes if each.killed)


def certify(resume_history: ResumeHistory, facts: Facts, *, steps: int, ledger: str) -> Certificate:
    """The certificate as the run stands. The ledger is worked out again for exact runs, which takes a while."""
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
    """The same certificate in all processes; for an exact run the leading one leaves it in the folder `home`."""
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
    """Leave it where the run leaves its files, and say what it says."""
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
        again = f"{len(c.kill_points)} times broken off, {c.compared} losses computed again and equal"
        but = f"; {', '.join(c.unread)} could not be read and compared" if c.unread else ""
        resume_history.notify(f"exact: {c.steps} steps, {again}{but}; see {path}")


def violations(certificate: Certificate) -> Iterator[str]:
    """Why a run is not exact."""
    if not certificate.is_ledger_right:
        yield "its ledger is wrong"
    if certificate.largest_difference:
        yield f"losses of the same step are up to {certificate.largest_difference:g} apart"
    yield from (f"on its way, {change}" for change in certificate.changed)


def output_folder(run: object) -> Path | None:
    """The folder of a run, or the outputs of the job; none where nothing is kept."""
    if isinstance(run, str | Path):
        return Path(run)
    return job.outputs if run is None and os.environ.get("FALAJ_OUTPUTS") else None


def ledger_head(facts: Facts, steps: int) -> str:
    """The head of the ledger that the facts give after so many steps."""
    return expected_head(BatchPlan(**{name: facts[name] for name in ADDRESSING}), steps)  # type: ignore[arg-type]


def encode_certificate(certificate: Certificate) -> bytes:
    """As JSON, with a digest of all the rest."""
    said = {"version": VERSION, **asdict(certificate)}
    return json.dumps(said | {"sha256": digest(said)}, indent=2, ensure_ascii=False).encode()


def decode_certificate(data: bytes | bytearray) -> Certificate:
    """What `encode_certificate` has made; refused if it is anything else."""
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
        raise CertificateInvalid("the certificate was changed after it was made", faults=[fault])
    return replace(found, resumes=resumes, changed=tuple(found.changed), unread=tuple(found.unread))


def digest(said: Mapping[str, Any]) -> str:
    return sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def write_certificate(certificate: Certificate, folder: Path) -> Path:
    """Put it into `folder` at a stroke."""
    path, aside = folder / FILE, folder / f".{FILE}.part"
    aside.write_bytes(encode_certificate(certificate))
    return aside.replace(path)


# -------------------------------------------------------------------------------------- checking again


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
    """The certificate at `path`, after all of it was worked out again; CertificateFalse says what is not so.

    What is given of the batches must be what it is about. With `run`, the folder of a run that no platform kept, its
    losses are compared with what was logged there. That the run was exact is for `certificate.exact` to say.
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
        yield TrainingFault("exact", c.exact, "what the rest of it gives")


def log_faults(certificate: Certificate, run: Path) -> Iterator[TrainingFault]:
    """What the log of the run says otherwise."""
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
