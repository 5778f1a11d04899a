"""Opens what an import names: the address of an MLflow server, its SQLite file, or an export of W&B."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from falaj.errors import InvalidInput, NotFound, shorten
from falaj.sdk.run_import.destination import Destination
from falaj.sdk.run_import.importer import Advance, ImportOptions, RunImport
from falaj.sdk.run_import.mlflow_file import MAGIC, MlflowFile
from falaj.sdk.run_import.report import ImportReport
from falaj.sdk.run_import.source import RunSource, SourceExperiment

if TYPE_CHECKING:
    from falaj.sdk.platform import Platform

SourceKind = Literal["mlflow", "wandb"]
Watch = Callable[[int | None], AbstractContextManager[Advance]]
SQLITE_PREFIX = "sqlite:///"
MOST_NAMES = 20


def import_runs(
    platform: Platform,
    source: str | Path,
    *,
    kind: str | None = None,
    experiments: Sequence[str] = (),
    artifacts: Path | None = None,
    workspace: str | None = None,
    watch: Watch = lambda _rows: nullcontext(lambda _amount: None),
    **options: Any,
) -> ImportReport:
    """Copy runs of a source. `watch` is given how many runs and points there are, and told of those that are done."""
    opened = open_source(source, kind=kind, artifacts=artifacts)
    with closing(opened):
        chosen = choose_experiments(opened, experiments)
        with watch(opened.rows(chosen)) as advance:
            destination = Destination(platform, workspace)
            return RunImport(opened, destination, ImportOptions(**options), advance=advance).copy(chosen)


def open_source(given: str | Path, *, kind: str | None = None, artifacts: Path | None = None) -> RunSource:
    """Return the source at an address or in a file; by default its first bytes tell what it is.

    `artifacts` is the folder of the artifacts, where those are not beside the file.
    """
    text = str(given)
    if kind not in (None, "mlflow", "wandb"):
        raise InvalidInput.at("--from", given=kind, allowed="mlflow or wandb")
    if artifacts is not None and not artifacts.is_dir():
        raise InvalidInput.at("--artifacts", given=str(artifacts), allowed="a folder")
    if text.startswith(("http://", "https://")):
        return _server(text, kind, artifacts)
    path = Path(text.removeprefix(SQLITE_PREFIX))
    if not path.is_file():
        raise InvalidInput.at(
            "SOURCE",
            given=text,
            allowed="the address of an MLflow server, its SQLite file, or an export of W&B in JSON lines",
        )
    if (kind or _kind_of(path)) == "mlflow":
        return MlflowFile(path, artifacts=artifacts)
    from falaj.sdk.run_import.wandb_export import WandbExport

    return WandbExport(path, artifacts=artifacts)


def _server(url: str, kind: str | None, artifacts: Path | None) -> RunSource:
    if kind == "wandb":
        raise InvalidInput.at(
            "SOURCE",
            given=url,
            allowed="an export of W&B in a file",
            fix="docs/howto/import-runs.md has the script that writes it",
        )
    if artifacts is not None:
        raise InvalidInput.at("--artifacts", given=str(artifacts), allowed="nothing: the server has them")
    from falaj.sdk.run_import.mlflow_server import MlflowServer

    return MlflowServer(url)


def _kind_of(path: Path) -> SourceKind:
    try:
        with path.open("rb") as file:
            head = file.read(len(MAGIC))
    except OSError as error:
        raise InvalidInput.at(str(path), given=error.strerror, allowed="a file that can be read") from None
    if head.startswith(MAGIC):
        return "mlflow"
    if head.lstrip().startswith(b"{"):
        return "wandb"
    raise InvalidInput.at(
        "SOURCE",
        given=f"{path}, which begins with {shorten(head)}",
        allowed="a SQLite database of MLflow, or JSON lines of W&B",
    )


def choose_experiments(source: RunSource, names: Sequence[str]) -> list[SourceExperiment]:
    """Return the experiments of these names, or all of them; NotFound names those that the source does not have."""
    found = list(source.experiments())
    if not names:
        return found
    if missing := [name for name in names if name not in {each.name for each in found}]:
        known = ", ".join(shorten(each.name, limit=40) for each in found[:MOST_NAMES])
        raise NotFound(f"{source.where} has no experiment {', '.join(missing)}; it has {known or 'none'}")
    return [each for each in found if each.name in names]
