"""`falaj models`: models and their versions, and the model that a job saved."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from falaj.apps.cli.commands.models_cards import alias as show_alias
from falaj.apps.cli.commands.models_cards import bom, card, check_gates, diff
from falaj.apps.cli.commands.models_compose import compose
from falaj.apps.cli.commands.models_evaluate import evaluate
from falaj.apps.cli.commands.models_optimize import optimize
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.operations import show_page
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.names import completion_of, full_id
from falaj.apps.cli.output.messages import Given, Message, show_or_tell
from falaj.apps.cli.output.progress import progress
from falaj.apps.cli.output.tables import show_fields, show_rows
from falaj.apps.cli.output.values import format_duration, format_metrics, format_value, plural, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import InvalidInput
from falaj.records.models.gates import GateRules, GateWaiver, MetricMeasurement
from falaj.records.registry import (
    SIGNATURE_FILE,
    Alias,
    AliasChange,
    Approval,
    ExportTarget,
    Model,
    ModelExport,
    ModelVersion,
    Promotion,
    TensorSpec,
    VersionKey,
)
from falaj.records.sizes import RULE as SIZE_RULE
from falaj.records.sizes import format_size, read_size
from falaj.sdk.platform import Platform


def _versions_command(version: str) -> str:
    """Return the command that lists the versions of the model of `version`."""
    model = version.partition("@")[0]
    return f"models versions {model}" if re.fullmatch(r"[a-z0-9._/-]+", model) else "models list"


PRESENTATION = Presentation(
    columns={AliasChange: ("seq", "version", "previous", "move", "by", "at")},
    help={
        "before": "Versions before this one.",
        "sources": "What it was made from: an id, or kind:name.",
        "on": "The training set that the metrics are measured on.",
        "target": "The column of it that models predict: only metrics count that `models evaluate` computed.",
        "checks": "Checks: card-complete, no-drift-alert.",
        "licence": "An SPDX expression, such as Apache-2.0.",
        "example": "The path of the file with an example of its input.",
        "reason": "Why; it is kept.",
        "code": 'The code of the network, as JSON, such as {"entry": "nets:ChurnNet", "file": "nets.py"}.',
        "archive": "An uploaded archive that has the code of the network.",
    },
    examples={
        "sources": "blob:NAME",
        "metrics": "'auc >= champion - 0.002'",
        "checks": "card-complete",
        "licence": "Apache-2.0",
    },
    lists={"model": "models list", "model_version": _versions_command},
)


MODEL = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A model: its name or id.", autocompletion=completion_of("model")),
]
BEFORE = Annotated[str | None, typer.Option(metavar="BEFORE", help="Versions before this one.")]
VERSION = Annotated[
    str, typer.Argument(metavar="VERSION", help="A model version, such as churn@3 or churn@champion.")
]


@PRESENTATION.command("from-job")
def from_job(
    session: Session,
    job: arguments.JOB,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The model that it becomes the next version of.")
    ],
    *,
    workspace: Annotated[
        str | None, typer.Option(metavar="WORKSPACE", help="Where the model belongs.")
    ] = None,
) -> None:
    """Register the model that a job saved with fj.save_model as the next version of a model."""
    parsing.check_name("MODEL", model, command="models from-job")
    with session.platform() as platform:
        register_model(session, platform, job, model, workspace=workspace)


@PRESENTATION.command("list")
def list_models(
    session: Session,
    *,
    where: Annotated[
        str, typer.Option(metavar="WHERE", help="A condition, such as \"tags.team = 'risk'\".")
    ] = "",
    order_by: Annotated[
        list[str] | None,
        typer.Option(metavar="ORDER_BY", help="What to sort by, such as 'name DESC' (may be repeated)."),
    ] = None,
    workspace: arguments.OF_WORKSPACE = None,
    after: arguments.AFTER = "",
    limit: arguments.LIMIT = "100",
    everything: arguments.ALL = False,
) -> None:
    """List the models of a workspace, and the versions of their aliases."""
    typed: dict[str, Any] = {"workspace": workspace, "after": after, "limit": limit}
    typed |= {"where": where, "order_by": order_by or []}
    show_page(session, "models.list", typed, _show_models, everything=everything)


@PRESENTATION.command("versions")
def versions(
    session: Session,
    model: MODEL,
    *,
    before: BEFORE = None,
    limit: arguments.LIMIT = "100",
    everything: arguments.ALL = False,
) -> None:
    """List the versions of a model, newest first."""
    typed = {"model": model, "before": before, "limit": limit}
    show_page(session, "models.versions", typed, _show_versions, everything=everything)


@PRESENTATION.command("version")
def version(session: Session, model: VERSION) -> None:
    """Show one version, such as churn@14."""
    parsing.check(all_operations()["models.version"], {"model": model})
    with session.platform() as platform:
        found = platform.models.version(model)
    session.show(found, _show_version)


@PRESENTATION.command("export")
def export(
    session: Session,
    model: VERSION,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder to write: a new or an empty one.")],
    *,
    to: Annotated[str, typer.Option(metavar="TO", help="files, triton, kserve or edge.")],
    storage_uri: Annotated[
        str | None, typer.Option(metavar="URI", help="Where KServe finds the folder model/, like s3://…")
    ] = None,
    cpus: Annotated[str | None, typer.Option(metavar="CPUS", help="CPUs of a replica on KServe.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a replica on KServe, like 2GiB.")
    ] = None,
    gpus: Annotated[str | None, typer.Option(metavar="GPUS", help="GPUs of a replica. (default: 0)")] = None,
    max_batch_rows: Annotated[
        str | None,
        typer.Option(metavar="ROWS", help="Largest batch that Triton makes; 0: none. (default: 64)"),
    ] = None,
    archive: Annotated[
        str | None, typer.Option(metavar="FILE.tar.gz", help="Write the folder as an archive, too.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:
    """Write a version to a folder, signed: its files, or for Triton, for KServe, or as an edge bundle with a runner."""
    operation = all_operations()["models.export"]
    options = parsing.parse(
        operation,
        {"storage_uri": storage_uri, "cpus": cpus, "gpus": gpus, "max_batch_rows": max_batch_rows},
        command="models export",
    )
    if memory is not None:
        if (size_bytes := read_size(memory)) is None:
            raise InvalidInput.at("--memory", given=memory, allowed=SIZE_RULE, fix="--memory 2GiB")
        options["memory_bytes"] = size_bytes
    typed = {"model": model, "to": to, **options}
    parsing.check(
        operation, typed, command="models export", spelling={"model": "VERSION", "memory_bytes": "--memory"}
    )
    whither: dict[str, Any] = {"to": to, "archive": archive, "force": force}
    with session.platform() as platform, progress(f"exporting {model}", total=None, unit="bytes") as advance:
        made = platform.export(model, folder, **whither, advance=advance, **options)
    show_or_tell(session, made, _exported(made, folder, archive))


@PRESENTATION.command("signing-key")
def signing_key(session: Session, model: VERSION) -> None:
    """Print the public key, as PEM, that verifies model.sig of a version exported as files."""
    parsing.check(all_operations()["models.signing_key"], {"model": model})
    with session.platform() as platform:
        found = platform.models.signing_key(model)
    session.show(found, _show_key)


def _show_key(found: VersionKey) -> None:
    print(found.pem, end="")


def _exported(made: ModelExport, folder: str, archive: str | None) -> Message:
    packed = "" if archive is None else f", and to {archive}"
    facts = f"{plural(len(made.files), 'file')}, {format_size(made.size_bytes)}"
    lines = [
        f"{made.version} is exported to {folder}{packed}: {facts}",
        f"  signer {made.fingerprint}",
        f"  label  {made.label.describe()}",
        *(f"  to do  {note}" for note in made.notes),
    ]
    if made.to is ExportTarget.EDGE:
        lines.append(f"  next   python {folder}/run.py --verify --key {made.fingerprint}")
    if made.to is ExportTarget.FILES:
        lines.append(f"  next   falaj models signing-key {made.version} > falaj.pub")
        verified = f"model_signing verify key {folder} --signature {folder}/{SIGNATURE_FILE}"
        lines.append(f"         {verified} --public_key falaj.pub")
    return Message("\n".join(lines))


def _show_models(found: tuple[Model, ...]) -> None:
    headings = ["name", "versions", "aliases", "created"]
    show_rows(
        headings,
        [[each.name, str(each.versions), _aliases(each), format_value(each.created_at)] for each in found],
    )


def _aliases(model: Model) -> str:
    aliases = [
        f"{each.alias} {each.version or '-'}{' (protected)' if each.protected else ''}"
        for each in model.aliases
    ]
    return ", ".join(aliases) or "-"


def _show_versions(found: tuple[ModelVersion, ...]) -> None:
    rows = [
        [
            each.reference,
            each.format.value,
            format_size(each.size_bytes),
            format_metrics(each.metrics),
            format_value(each.created_at),
        ]
        for each in found
    ]
    show_rows(["version", "format", "size", "metrics", "created"], rows)


def _show_version(found: ModelVersion) -> None:
    show_fields(
        {
            "version": found.reference,
            "format": found.format.value,
            "metrics": format_metrics(found.metrics),
            "licence": found.licence or "-",
            "run": format_value(found.run),
            "training set": format_value(found.training_set),
            "sources": format_value(found.sources),
            "hardware": "-" if found.hardware is None else found.hardware.describe(),
            "packages": str(len(found.packages)) if found.packages else "-",
            "example": found.example or "-",
            "code": "-" if found.code is None else found.code.describe(),
            "author": found.author,
            "created": format_value(found.created_at),
            "label": format_value(found.label),
            "signed by": f"key {found.key}",
            "signed as": found.signed_as.value,
            "id": found.id,
        }
    )
    print()
    show_rows(
        ["file", "size", "sha256"],
        [[each.path, format_size(each.size_bytes), each.sha256] for each in found.files],
    )
    tensors = [("input", each) for each in found.inputs] + [("output", each) for each in found.outputs]
    if tensors:
        print()
        show_rows(["tensor", "name", "type", "shape", "columns"], [_tensor(*each) for each in tensors])
    if found.card:
        print(f"\n{printable(found.card.rstrip())}")


def _tensor(direction: str, each: TensorSpec) -> list[str]:
    shape = " × ".join("any" if size < 0 else str(size) for size in each.shape) or "-"
    return [direction, each.name, str(each.dtype), shape, ", ".join(each.features) or "-"]


def register_model(
    session: Session, platform: Platform, job: str, model: str, *, workspace: str | None
) -> None:
    """Register the model that a job saved, and print the version."""
    made = platform.register(full_id(platform, "job", job), model, workspace=workspace)
    show_or_tell(session, made, _registered(made, {}))


@PRESENTATION.message("models.register")
def _registered(made: ModelVersion, given: Given) -> Message:
    words = f"{made.reference} is registered: {made.format}, {format_size(made.size_bytes)}, signed"
    follow = (
        ("next", f"models promote {made.reference} --to champion"),
        ("next", f"deploy {made.reference}"),
    )
    return Message(words, follow)


@PRESENTATION.message("models.promote", "models.rollback")
def _promoted(made: Promotion, given: Given) -> Message:
    change, was = made.change, f" (was {made.change.previous})" if made.change.previous else ""
    approved = f", approved by {', '.join(made.approved_by)}" if made.approved_by else ""
    undo = (("undo", f"models rollback {made.model} --alias {change.alias}"),) if change.previous else ()
    return Message(f"{change.version} is {change.alias}{was}{approved}", undo)


@PRESENTATION.message("models.approve")
def _approved(made: Approval, given: Given) -> Message:
    follow = f"models promote {made.version} --to {made.alias}"
    gates = () if made.evidence is None else made.evidence.gates
    sources = dict.fromkeys(source.describe() for each in gates for source in each.sources)
    words = [
        f"{made.version} is approved for {made.alias} by {made.by}",
        *(f"  on {each}" for each in sources),
    ]
    return Message("\n".join(map(printable, words)), (("next", follow),))


@PRESENTATION.command("approvals")
def approvals(
    session: Session,
    version: VERSION,
    *,
    alias: Annotated[str, typer.Option(metavar="ALIAS", help="The alias that they are for.")],
) -> None:
    """List the valid approvals of a version for an alias, and how each approver was appointed."""
    show_page(session, "models.approvals", {"model": version, "alias": alias}, _show_approvals)


def _show_approvals(found: tuple[Approval, ...]) -> None:
    rows = [
        [
            each.by,
            format_value(each.at),
            _granted(each),
            "-" if each.appointment is None else format_value(each.appointment.created_by),
            "yes" if each.independent else "no",
            "-" if each.evidence is None else each.evidence.card_sha256[:12],
            each.comment or "-",
        ]
        for each in found
    ]
    show_rows(["by", "at", "approver", "user made by", "independent of the author", "card", "comment"], rows)


def _granted(approval: Approval) -> str:
    """Return who made the approver one, how long before the approval, and through which group."""
    found = approval.appointment
    if found is None:
        return "by a policy, or not recorded"
    age = "" if found.granted_at is None else f" {format_duration(approval.at - found.granted_at)} before"
    through = "" if found.group is None else f", in {found.group} by {format_value(found.added_by)}"
    return f"by {format_value(found.granted_by)}{age}{through}"


@PRESENTATION.message("models.protect")
def _protected(made: Alias, given: Given) -> Message:
    who = (
        "someone whom their author did not appoint" if made.independent else "someone other than their author"
    )
    words = f"{made.alias} can only be set to versions that {who} has approved"
    return Message(words, (("next", f"models approve VERSION --alias {made.alias}"),))


@PRESENTATION.message("models.set_gates")
def _gates_set(made: GateRules, given: Given) -> Message:
    rules = [*made.metrics, *made.checks]
    how = "measured" if made.target is None else f"computed for {made.target}"
    on = "" if made.on is None or not made.metrics else f", {how} on {given['on']}"
    words = f"{made.alias} has the gates {'; '.join(rules)}{on}" if rules else f"{made.alias} has no gates"
    follow = (("next", f"models check-gates VERSION --alias {made.alias}"),) if rules else ()
    return Message(words, follow)


@PRESENTATION.message("models.waive_gates")
def _waived(made: GateWaiver, given: Given) -> Message:
    gates = "; ".join(each.gate for each in made.gates)
    words = (
        f"{made.version} may fail for {made.alias}: {gates}. Waived by {made.by}: {printable(made.reason)}"
    )
    return Message(words, (("next", f"models promote {made.version} --to {made.alias}"),))


@PRESENTATION.message("models.record_metrics")
def _measured(made: MetricMeasurement, given: Given) -> Message:
    return Message(f"{made.version} on {made.on}: {format_metrics(made.metrics)}")


PRESENTATION.commands |= {"optimize": optimize, "compose": compose, "card": card, "bom": bom, "diff": diff}
PRESENTATION.commands |= {"alias": show_alias, "check-gates": check_gates, "evaluate": evaluate}
