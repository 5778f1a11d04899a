"""After a write: what happened, then the next command, or the one that undoes it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from falaj.apps.cli.output.values import format_value, plural
from falaj.apps.cli.session import Session
from falaj.records.control.pipelines import StoredPipeline
from falaj.records.control.workflows import WorkflowRun
from falaj.records.features import MaterializeResult
from falaj.records.governance.blobs import Blob
from falaj.records.governance.identity import Grant, Group, Principal, SignInLink, Token, Workspace
from falaj.records.governance.keys import KeyDestruction, KeyRotation
from falaj.records.governance.objects import LabelChange
from falaj.records.governance.policy import Policy
from falaj.records.governance.secrets import Secret
from falaj.records.monitoring.monitors import Alert, Monitor, MonitorRemoval
from falaj.records.registry import Alias, Approval, ModelVersion, Promotion
from falaj.records.serving import DeployedEndpoint, FeedbackResult
from falaj.records.sizes import format_size
from falaj.records.training.jobs import Job, JobMove


class Message(NamedTuple):
    """What happened, and commands to go on with: (why, the command without `falaj`)."""

    words: str
    then: tuple[tuple[str, str], ...] = ()


Given = Mapping[str, Any]


def print_message(session: Session, said: Message) -> None:
    """What happened, then the commands to go on with."""
    print(said.words)
    for why, command in said.then:
        print(f"  {why:<6} {session.full_command(command)}")


def result_message(operation: str, result: Any, given: Given) -> Message | None:
    """What to say after `operation`; none where its result speaks for itself."""
    say = SENTENCES.get(operation)
    return None if say is None else say(result, given)


def _workspace_made(made: Workspace, given: Given) -> Message:
    grant = f"workspaces grant {made.name} USER --role developer"
    return Message(f"workspace {made.name} is made; you administer it", (("next", grant),))


def _granted(made: Grant, given: Given) -> Message:
    undo = _of(f"workspaces revoke {made.workspace}", given["subject"], f"--role {made.role}")
    return Message(f"{made.subject} is {made.role} in {made.workspace}", (("undo", undo),))


def _revoked(made: Grant, given: Given) -> Message:
    undo = _of(f"workspaces grant {made.workspace}", given["subject"], f"--role {made.role}")
    return Message(f"{made.subject} is no longer {made.role} in {made.workspace}", (("undo", undo),))


def _user_made(made: Principal, given: Given) -> Message:
    kind = "user" if made.kind == "user" else "service account"
    return Message(
        f"{kind} {made.name} is made, without any role",
        (
            ("next", f"workspaces grant default {made.name} --role developer"),
            ("next", f"tokens issue --user {made.name} --purpose PURPOSE"),
        ),
    )


def _disabled(made: Principal, given: Given) -> Message:
    return Message(
        f"{made.name} is disabled, with every token of theirs", (("undo", f"users enable {made.name}"),)
    )


def _enabled(made: Principal, given: Given) -> Message:
    return Message(f"{made.name} is let in again", (("undo", f"users disable {made.name}"),))


def _group_made(made: Group, given: Given) -> Message:
    return Message(f"group {made.name} is made, empty", (("next", f"groups add {made.name} USER"),))


def _joined(made: Group, given: Given) -> Message:
    undo = _of(f"groups remove {made.name}", given["user"])
    return Message(f"{given['user']} is in {made.name}: {format_value(made.members)}", (("undo", undo),))


def _left(made: Group, given: Given) -> Message:
    undo = _of(f"groups add {made.name}", given["user"])
    return Message(f"{given['user']} is not in {made.name}: {format_value(made.members)}", (("undo", undo),))


def _token_revoked(made: Token, given: Given) -> Message:
    return Message(f"token {made.id} of {made.principal} ({made.purpose}) is revoked, everywhere")


def _linked(made: SignInLink, given: Given) -> Message:
    return Message(
        f"{made.code}\nThis code signs in once, until {format_value(made.expires_at)}.",
        (("next", f"login URL#code={made.code}"),),
    )


def _published(made: Policy, given: Given) -> Message:
    where = "everywhere" if made.workspace == "platform" else f"in {made.workspace}"
    undo = f"policies withdraw {made.workspace}/{made.name}"
    return Message(f"policy {made.name}, version {made.version}, is in force {where}", (("undo", undo),))


def _withdrawn(made: Policy, given: Given) -> Message:
    undo = f"policies publish {made.name} FILE --workspace {made.workspace}"
    return Message(f"policy {made.name} is out of force in {made.workspace}", (("undo", undo),))


def _labelled(made: LabelChange, given: Given) -> Message:
    words = f"{made.object.address} is labelled: {made.object.label.describe()}"
    reach = f"{plural(made.reached, 'object')} downstream changed with it"
    wrong = [f"  {each.address} must not lie in zone {each.zone} any more" for each in made.misplaced]
    undo = (
        (("undo", _of("objects unlabel", given["object"])),) if "only" in given or "classes" in given else ()
    )
    return Message("\n".join([f"{words}; {reach}", *wrong]), undo)


def _rotated(made: KeyRotation, given: Given) -> Message:
    return Message(
        f"root key {made.root} wraps from now on; {plural(made.rewrapped, 'data key')} wrapped again"
    )


def _destroyed(made: KeyDestruction, given: Given) -> Message:
    return Message(
        f"the keys of {made.workspace} are destroyed: nobody can read its {plural(made.blobs, 'blob')} again"
    )


def _secret_set(made: Secret, given: Given) -> Message:
    place = f"{given['workspace']}/" if given.get("workspace") else ""
    words = "is set" if made.created_at == made.changed_at else "has a new value"
    variable = made.name.upper().replace("-", "_").replace(".", "_")
    use = _of("train SCRIPT --secret", f"{variable}={place}{made.name}")
    return Message(
        f"secret {made.name} {words}; jobs get it, nobody is shown it",
        (("next", use), ("undo", f"secrets remove {place}{made.name}")),
    )


def _secret_removed(made: Secret, given: Given) -> Message:
    return Message(f"secret {made.name} is removed with its value", (("undo", f"secrets set {made.name}"),))


def _staged(made: Blob, given: Given) -> Message:
    return Message(
        f"{format_size(made.size_bytes)} staged in zone {made.zone} as {made.id}; without a name they are swept in a day",
        (("next", f"blobs commit {made.id} --name NAME"),),
    )


def _committed(made: Blob, given: Given) -> Message:
    place = f"{given['workspace']}/" if given.get("workspace") else ""
    named = f"{place}{made.name}" if "workspace" in given else made.id
    stored = f"{format_size(made.size_bytes)} in zone {made.zone}, {made.label.describe()}"
    return Message(
        f"blob {made.name} is stored: {stored}\n  sha256 {made.sha256}",
        (("next", f"blobs get {named}"), ("undo", f"blobs delete {named}")),
    )


def _deleted(made: Blob, given: Given) -> Message:
    return Message(
        f"blob {made.name} is deleted; its {format_size(made.size_bytes)} go with the next sweep",
        (("next", "blobs cleanup --older-than 0s"),),
    )


def _copying(made: WorkflowRun, given: Given) -> Message:
    return Message(
        f"work {made.id} copies {given['blob']} to zone {given['zone']}",
        (("next", f"workflows watch {made.id}"),),
    )


def _optimizing(made: WorkflowRun, given: Given) -> Message:
    return Message(
        f"work {made.id} measures variants of {given['model']}", (("next", f"workflows watch {made.id}"),)
    )


def _swept(made: Any, given: Given) -> Message:
    return Message(f"{plural(made.removed, 'leftover')} removed")


def _materialized(made: MaterializeResult, given: Given) -> Message:
    words = f"{given['view']}: the newest of {plural(made.keys, 'key')} online, version {made.version}"
    return Message(words, (("next", _of("features read", given["view"], "KEY")),))


def _cancelled(made: WorkflowRun, given: Given) -> Message:
    return Message(f"work {made.id} stops before its next step", (("next", f"workflows watch {made.id}"),))


def _submitted(made: Job, given: Given) -> Message:
    return Message(f"job {made.id} ({made.name}) is queued", (("next", f"jobs logs {made.id} --follow"),))


def _retried(made: Job, given: Given) -> Message:
    words = (
        f"job {made.id} ({made.name}) is queued again, as run {made.run}, and goes on from what it has saved"
    )
    return Message(words, (("next", f"jobs logs {made.id} --follow"),))


def _job_cancelled(made: Job, given: Given) -> Message:
    words = "is cancelled" if made.state.ended else "is asked to end, and killed if it does not"
    return Message(f"job {made.id} {words}", (("undo", f"jobs retry {made.id}"),))


def _job_moved(made: JobMove, given: Given) -> Message:
    return Message(f"job {made.job.id} is moved: {made.words}", (("next", f"jobs show {made.job.id}"),))


def _deployed(made: DeployedEndpoint, given: Given) -> Message:
    shares = ", ".join(f"{made.model}@{each.version} ({each.weight})" for each in made.routes)
    where = f"\n  at     {made.url}/infer" if made.url else "\n  at     an address that 'falaj up' gives it"
    undo = " ".join(f"{each.version}={each.weight}" for each in made.previous)
    named = _endpoint(made, given)
    back = f"endpoints route {named} {undo}" if made.previous else f"endpoints remove {named}"
    return Message(
        f"{made.name} is answered by {shares}{where}",
        (("next", f"endpoints stats {named}"), ("undo", back)),
    )


def _endpoint(made: DeployedEndpoint, given: Given) -> str:
    """As it was typed, or by the name that it was given."""
    place = f"{given['workspace']}/" if given.get("workspace") else ""
    return shlex.quote(str(given.get("endpoint") or f"{place}{made.name}"))


def _removed(made: DeployedEndpoint, given: Given) -> Message:
    undo = f"deploy {made.model}@{made.routes[0].version} --name {made.name}"
    return Message(f"{made.name} answers no more; its predictions stay", (("undo", undo),))


def _scored(made: FeedbackResult, given: Given) -> Message:
    unknown = f"; {plural(len(made.unknown), 'prediction')} not in the log (yet)" if made.unknown else ""
    return Message(
        f"{plural(made.stored, 'label')} stored, {made.replaced} in place of earlier ones{unknown}",
        (("next", _of("endpoints stats", given["endpoint"])),),
    )


def _registered(made: ModelVersion, given: Given) -> Message:
    words = f"{made.reference} is registered: {made.format}, {format_size(made.size_bytes)}, signed"
    follow = (
        ("next", f"models promote {made.reference} --to champion"),
        ("next", f"deploy {made.reference}"),
    )
    return Message(words, follow)


def _promoted(made: Promotion, given: Given) -> Message:
    change, was = made.change, f" (was {made.change.previous})" if made.change.previous else ""
    approved = f", approved by {', '.join(made.approved_by)}" if made.approved_by else ""
    undo = (("undo", f"models rollback {made.model} --alias {change.alias}"),) if change.previous else ()
    return Message(f"{change.version} is {change.alias}{was}{approved}", undo)


def _approved(made: Approval, given: Given) -> Message:
    follow = f"models promote {made.version} --to {made.alias}"
    return Message(f"{made.version} is approved for {made.alias} by {made.by}", (("next", follow),))


def _protected(made: Alias, given: Given) -> Message:
    words = f"{made.alias} moves only to versions that someone other than their author has approved"
    return Message(words, (("next", f"models approve VERSION --alias {made.alias}"),))


def _rebased(made: Monitor, given: Given) -> Message:
    words = (
        f"{made.name} compares with {given['reference']} from now on: {plural(made.reference_rows, 'row')}"
    )
    return Message(words, (("next", f"monitoring check {made.name}"),))


def _unwatched(made: MonitorRemoval, given: Given) -> Message:
    return Message(f"{given['monitor']} watches no more; its alerts stay")


def _acknowledged(made: Alert, given: Given) -> Message:
    words = f"alert {made.id} is acknowledged; if the drift goes on, its next window raises a new one"
    return Message(words, (("next", f"monitoring alert {made.id}"),))


def _pipeline_applied(made: StoredPipeline, given: Given) -> Message:
    plan = made.definition
    starts = [words for words, on in (("drift", plan.on_drift), (f"every {plan.every}", plan.every)) if on]
    words = f"pipeline {plan.name} trains {plan.model} anew for {plan.endpoint}"
    words += f"; started by {' and '.join([*starts, 'a person'])}"
    return Message(words, (("next", f"pipelines start {plan.name}"),))


def _pipeline_started(made: WorkflowRun, given: Given) -> Message:
    return Message(f"work {made.id} trains anew", (("next", f"workflows watch {made.id}"),))


def _canary_started(made: WorkflowRun, given: Given) -> Message:
    words = f"work {made.id} tries {given['model']} on {given['endpoint']}"
    return Message(words, (("next", f"workflows watch {made.id}"),))


def _of(start: str, *words: Any) -> str:
    """A command line of `start`, a value that was typed, and the rest."""
    first, *rest = words
    return " ".join([start, shlex.quote(str(first)), *rest])


SENTENCES: dict[str, Callable[[Any, Given], Message]] = {
    "workspaces.create": _workspace_made,
    "workspaces.grant": _granted,
    "workspaces.revoke": _revoked,
    "users.create": _user_made,
    "users.disable": _disabled,
    "users.enable": _enabled,
    "groups.create": _group_made,
    "groups.add": _joined,
    "groups.remove": _left,
    "tokens.revoke": _token_revoked,
    "tokens.sign_in_link": _linked,
    "policies.publish": _published,
    "policies.withdraw": _withdrawn,
    "objects.label": _labelled,
    "objects.unlabel": _labelled,
    "keys.rotate": _rotated,
    "keys.destroy": _destroyed,
    "secrets.set": _secret_set,
    "secrets.remove": _secret_removed,
    "blobs.upload": _staged,
    "blobs.commit": _committed,
    "blobs.delete": _deleted,
    "blobs.copy": _copying,
    "blobs.cleanup": _swept,
    "optimization.start": _optimizing,
    "workflows.cancel": _cancelled,
    "endpoints.deploy": _deployed,
    "endpoints.route": _deployed,
    "endpoints.remove": _removed,
    "endpoints.feedback": _scored,
    "jobs.submit": _submitted,
    "jobs.retry": _retried,
    "jobs.cancel": _job_cancelled,
    "jobs.move": _job_moved,
    "features.materialize": _materialized,
    "models.register": _registered,
    "monitoring.set_reference": _rebased,
    "monitoring.remove": _unwatched,
    "monitoring.acknowledge": _acknowledged,
    "models.promote": _promoted,
    "models.rollback": _promoted,
    "models.approve": _approved,
    "models.protect": _protected,
    "pipelines.apply": _pipeline_applied,
    "pipelines.start": _pipeline_started,
    "pipelines.canary": _canary_started,
}
