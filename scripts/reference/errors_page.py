"""docs/reference/errors.md: every error code, with its HTTP status, meaning, usual cause and fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from falaj.apps.api.errors import status_of
from falaj.errors import FalajError
from falaj.training.runtime.errors import TrainingError
from reference.markdown import docstring, table

HEAD = """# Errors

Every error has a type, a stable code, a message, and often *faults*: where, what was given, what is allowed, and the
fix. Callers match types or codes; messages may change.

| interface | how an error arrives |
|---|---|
| Python | an exception; `except fj.FalajError as error:` has `error.code`, `.message`, `.faults`, `.details` |
| CLI | `error[CODE] message` and the faults on standard error, exit status 1 (2 for misuse) |
| REST | the status below, and a [problem document](rest.md#errors) with the same `code`, `faults` and `details` |
| a job | the reason in `falaj jobs show`, the traceback in `falaj jobs logs` |

A code stands below the code whose type it extends: whoever catches `InvalidInput` also catches `ConfigInvalid`.
"""

TRAINING = """## Errors of training

Raised by `fj.fit`, `fj.step`, `fj.estimate`, `fj.verify_certificate` and `fj.job` in the process that trains,
also without a platform; their base is `TrainingError` in `falaj.training.runtime.errors`. They have no HTTP status.
"""


class Remedy(NamedTuple):
    """The usual cause of an error, and what to do."""

    cause: str
    fix: str


REMEDIES: dict[str, Remedy] = {
    "input.invalid": Remedy(
        "A wrong type, an unknown field, a name with characters that are not allowed, a timestamp without a time zone.",
        "Correct the fields that the faults name. Names are lower case, with `-`, `_` and `.` inside.",
    ),
    "config.invalid": Remedy(
        "A misspelled or unknown setting; a secret whose variable is not set or whose file others can read; "
        "a home that belongs to another user.",
        "`falaj config check` names every fault by line and field; see [falaj.toml](configuration.md).",
    ),
    "policy.invalid": Remedy(
        "A syntax error, an unknown action or attribute, or a template with open slots.",
        "`falaj policies check FILE` shows the place, `falaj policies schema` what exists; "
        "see [policies](../howto/policies.md).",
    ),
    "input.too_large": Remedy(
        "A JSON body above `server.body_limit_bytes`, a code folder with data in it, or a checkpoint above "
        "`jobs.checkpoint_limit`.",
        "Upload data as a blob and pass its reference; keep data out of the folder of a script.",
    ),
    "object.not_found": Remedy(
        "A misspelled name, another workspace, or no role in the workspace: what you may not see looks the same.",
        "List the objects of that kind; write `workspace/name`; ask an admin of the workspace for a role.",
    ),
    "object.conflict": Remedy(
        "The object is in use, has ended, or somebody changed it in the meantime.",
        "Look at it again with its `show` operation and repeat with what is true now.",
    ),
    "object.exists": Remedy(
        "The name was used before; training sets, model versions and committed blobs are immutable.",
        "Choose another name, or use the object that exists.",
    ),
    "idempotency.reused": Remedy(
        "One `Idempotency-Key` (or `fj.once` key) for two different calls within seven days.",
        "Use a new key for each call; repeat a key only with exactly the same input.",
    ),
    "caller.unknown": Remedy(
        "No token, a token that expired or was revoked, a disabled user, or a sign-in link that was used.",
        "`falaj login`, or set `FALAJ_TOKEN`. An administrator issues tokens: `falaj tokens issue --user YOU`; the "
        "owner of the home gets one by `falaj login` on its machine.",
    ),
    "policy.denied": Remedy(
        "Your roles in this workspace, a policy, or the scope of your token do not allow the action.",
        "`details` names the action and the roles that have it; `falaj policies who-can ACTION OBJECT` lists who may.",
    ),
    "residency.denied": Remedy(
        "A label such as `only AE`, of this object or of one that it was made from, excludes the zone's jurisdiction.",
        "Choose a zone in an allowed jurisdiction; `falaj lineage show OBJECT` shows where the label comes from.",
    ),
    "data.damaged": Remedy(
        "A disk fault, or a file that was changed or truncated outside Falaj.",
        "Restore the file from a backup, or make the object again; `falaj doctor` checks the home.",
    ),
    "audit.tampered": Remedy(
        "Rows of the audit log were inserted, changed or removed in the database.",
        "Stop, keep a copy, and compare with the witness: `falaj audit verify` names the entries.",
    ),
    "keys.unavailable": Remedy(
        "`falaj keys destroy` erased the keys of the workspace; the key file is missing; the HSM is locked.",
        "Destroyed keys cannot be recovered. Otherwise restore the key file, or check `[keys]` and the PIN.",
    ),
    "home.busy": Remedy(
        "`falaj up` or another `fj.open` runs on this home.",
        "Use the running platform (`fj.connect`, `falaj --url`), or stop it with `falaj down`.",
    ),
    "lease.lost": Remedy(
        "The controller was paused or cut off for longer than its lease, and a standby took over.",
        "Nothing: the write was refused, the new controller continues. If it recurs, look for an overloaded machine.",
    ),
    "stream.interrupted": Remedy(
        "The connection broke, or nothing was sent for a minute.",
        "Send an interrupted request again; it has changed nothing. Resume a stream with `offset` or a cursor.",
    ),
    "service.unavailable": Remedy(
        "The database, an object store or the model server does not answer; or an optional package is missing.",
        "Try again after `Retry-After`; `falaj status` and `falaj doctor` show what is down; "
        "install the extra that the message names.",
    ),
    "process.failed": Remedy(
        "The controller or another process of `falaj up` has ended three times with the same cause. "
        "It is started again, after longer and longer pauses.",
        "Read the log that the message names, and remove the cause: the error ends when the process runs again.",
    ),
    "serving.overloaded": Remedy(
        "An endpoint gets more requests than its model can answer in time.",
        "Send it again after `Retry-After`. To answer more: more instances, more rows a batch, a longer queue; "
        "see [tuning](serving.md#tuning).",
    ),
    "serving.rate_limited": Remedy(
        "The caller sends more requests a second than the endpoint or `serving.limits` allows to each caller.",
        "Send it again after `Retry-After`, or ask the operator for a higher limit.",
    ),
    "serving.deadline": Remedy(
        "A request with a time limit waited for longer than that.",
        "Give it more time, or reduce the load; see [overload](serving.md#overload).",
    ),
    "isolation.refused": Remedy(
        "No sandbox works here and the home has several users, or `isolation` asks for one that is not available.",
        "`falaj doctor` names what is missing; see [security](../explanation/security.md).",
    ),
    "internal": Remedy(
        "A fault in Falaj.",
        "Report it with the request id; the platform's log has the traceback. `FALAJ_DEBUG=1` prints it in the CLI.",
    ),
    "training.failed": Remedy(
        "With `fsdp`, processes that used different layers in a step wait for each other.",
        'Use every layer for every sample, or `parallel="ddp"`.',
    ),
    "training.invalid": Remedy(
        "A misspelled option, data without the named columns, an optimizer over other parameters, "
        "or a model that cannot be split.",
        "Apply the fix of each fault; see the [options](fit.md).",
    ),
    "training.ragged": Remedy(
        "Texts or images of different lengths or sizes.",
        "Pad or crop in the dataset's `__getitem__`.",
    ),
    "training.unreadable": Remedy(
        "`__getitem__` raised an exception, or its result cannot be sent between processes.",
        "The message names the sample: read it alone, then repair or remove it.",
    ),
    "training.worker": Remedy(
        "The kernel ended it for lack of memory, or `/dev/shm` is full.",
        "Fewer `workers`, a smaller `prefetch` or `batch_size`, or more memory for the job.",
    ),
    "training.not_finite": Remedy(
        "A learning rate that is too high, overflow in fp16, or bad samples.",
        'A smaller `lr`, `clip=1.0`, `precision="bf16"` or `"fp32"`, or without the samples that the error names.',
    ),
    "training.memory": Remedy(
        "Parameters, optimizer state and the activations of one sample exceed the memory of the device.",
        '`parallel="fsdp"` over more processes, a lower `precision`, a smaller model; `fj.estimate` tells what fits.',
    ),
    "training.no_estimate": Remedy(
        "The model fails on fake tensors and on samples of the data.",
        "Check that `model(inputs)` and the loss work on one batch; train without the estimate.",
    ),
    "training.callback": Remedy(
        "An exception in your callback; it is the `__cause__` of the error.",
        "Correct the callback and call `fit` again: the run resumes from its last checkpoint.",
    ),
    "checkpoint.damaged": Remedy(
        "A disk fault, or files that were changed or removed in the run's folder.",
        "Restore the folder, or start a new run; a single damaged checkpoint is skipped for an older one.",
    ),
    "checkpoint.mismatch": Remedy(
        "`run` names a folder of another model, or the model, optimizer or data changed since.",
        "Use the model and optimizer that the run started with, or another `run`.",
    ),
    "checkpoint.failed": Remedy(
        "The disk is full or read-only, or a process of the group died. "
        "One failure is reported, the second in a row ends the run.",
        "Free space, lower `checkpoint_keep`, and call `fit` again.",
    ),
    "certificate.false": Remedy(
        "The file was edited, is of another version, or belongs to another run or other batch parameters.",
        "Compare the faults with the run; make a new certificate with `exact=True`.",
    ),
    "agent.lost": Remedy(
        "The controller was stopped for longer than the runtime waits.",
        "`falaj status`; retry the job, which resumes from its last checkpoint.",
    ),
    "agent.refused": Remedy(
        "The attempt has ended or was given up while its process ran on, or the process is not one of it.",
        "None is needed: the job goes on with its next attempt; `falaj jobs show` says how the last one ended.",
    ),
}
"""By code. A code of the tree without an entry stops the generation."""


def errors_page() -> str:
    """Return the page."""
    platform = [*subclasses(FalajError)]
    training = [TrainingError, *subclasses(TrainingError)]
    known = {kind.code for kind in [*platform, *training]}
    if odd := known ^ REMEDIES.keys():
        raise SystemExit(f"REMEDIES in {__file__} and the error trees differ in: {', '.join(sorted(odd))}")
    overview = table(
        ("code", "type", "HTTP status", "meaning"),
        [(_link(kind.code), f"`{kind.__name__}`", str(_status(kind)), docstring(kind)) for kind in platform],
    )
    parts = [
        HEAD,
        "## Overview\n\n" + overview + "\n",
        *map(_entry, platform),
        TRAINING,
        *map(_entry, training),
    ]
    return "\n".join(parts)


def subclasses(
    kind: type[FalajError] | type[TrainingError],
) -> Iterator[type[FalajError] | type[TrainingError]]:
    """Yield all the types below `kind` in the order of the tree."""
    for below in kind.__subclasses__():
        yield below
        yield from subclasses(below)


def _entry(kind: type[FalajError] | type[TrainingError]) -> str:
    cause, fix = REMEDIES[kind.code]
    status = f", HTTP {_status(kind)}" if issubclass(kind, FalajError) else ""
    lines = [f"### {kind.code}", "", f"`{kind.__name__}`{status}. {docstring(kind)}", ""]
    return "\n".join([*lines, f"- Usual cause: {cause}", f"- Fix: {fix}", ""])


def _status(kind: type[FalajError]) -> int:
    return status_of(kind.__new__(kind))


def _link(code: str) -> str:
    return f"[`{code}`](#{code.replace('.', '')})"
