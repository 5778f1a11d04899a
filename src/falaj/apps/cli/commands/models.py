"""Models as people read them: one line per model and per version, and the model that a job saved."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from falaj.apps.cli.commands.train import JOB, register_model
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.operations import show_page
from falaj.apps.cli.output.tables import show_fields, show_rows
from falaj.apps.cli.output.values import format_metrics, format_value, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.records.registry import Model, ModelVersion, TensorSpec
from falaj.records.sizes import format_size

MODEL = Annotated[str, typer.Argument(metavar="MODEL", help="A model: its name or id.")]
VERSION = Annotated[str, typer.Argument(metavar="VERSION", help="A model version, such as churn@3.")]
AFTER = Annotated[str, typer.Option(metavar="AFTER", help=arguments.HELP["after"])]
LIMIT = Annotated[str, typer.Option(metavar="LIMIT", help=arguments.HELP["limit"])]


def from_job(
    session: Session,
    job: JOB,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Of which model it is the next version.")],
    *,
    workspace: Annotated[
        str | None, typer.Option(metavar="WORKSPACE", help="Where the model belongs.")
    ] = None,
) -> None:
    """Make the model that a job saved by fj.save_model the next version of a model."""
    parsing.check_name("MODEL", model, command="models from-job")
    with session.platform() as platform:
        register_model(session, platform, job, model, workspace=workspace)


def list_models(
    session: Session,
    *,
    workspace: Annotated[str | None, typer.Option(metavar="WORKSPACE", help="Of this workspace.")] = None,
    after: AFTER = "",
    limit: LIMIT = "100",
) -> None:
    """The models of a workspace, and where their aliases point."""
    typed = {"workspace": workspace, "after": after, "limit": limit}
    show_page(session, "models.list", typed, _show_models)


def versions(session: Session, model: MODEL, *, after: AFTER = "", limit: LIMIT = "100") -> None:
    """The versions of a model, newest first."""
    show_page(session, "models.versions", {"model": model, "after": after, "limit": limit}, _show_versions)


def version(session: Session, model: VERSION) -> None:
    """All that is known of one version, such as churn@14."""
    parsing.check(all_operations()["models.version"], {"model": model})
    with session.platform() as platform:
        found = platform.models.version(model)
    session.show(found, _show_version)


def _show_models(found: tuple[Model, ...]) -> None:
    headings = ["name", "versions", "aliases", "created"]
    show_rows(
        headings,
        [[each.name, str(each.versions), _aliases(each), format_value(each.created_at)] for each in found],
    )


def _aliases(model: Model) -> str:
    told = [
        f"{each.alias} {each.version or '-'}{' (protected)' if each.protected else ''}"
        for each in model.aliases
    ]
    return ", ".join(told) or "-"


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
            "run": format_value(found.run),
            "training set": format_value(found.training_set),
            "sources": format_value(found.sources),
            "author": found.author,
            "created": format_value(found.created_at),
            "label": format_value(found.label),
            "signed by": f"key {found.key}",
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


def _tensor(way: str, each: TensorSpec) -> list[str]:
    shape = " × ".join("any" if format_size < 0 else str(format_size) for format_size in each.shape) or "-"
    return [way, each.name, str(each.dtype), shape, ", ".join(each.features) or "-"]


GROUP_COMMANDS: dict[str, Any] = {
    "from-job": from_job,
    "list": list_models,
    "versions": versions,
    "version": version,
}
