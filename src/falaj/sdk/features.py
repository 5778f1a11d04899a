"""Features from Python: apply definition files, and upload rows from files or tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from falaj.errors import InvalidInput
from falaj.records.features import ApplyResult, Entity, FeatureView, IngestResult, TrainingSet
from falaj.sdk.definition_files.features import read_definitions

if TYPE_CHECKING:
    from falaj.sdk.platform import Platform

Definition = Entity | FeatureView
Rows: TypeAlias = Any
"""A file (Parquet, CSV or Arrow), a pyarrow Table, or a data frame of pandas or polars."""


def apply(
    platform: Platform, what: str | Path | Definition | Iterable[Definition], **where: Any
) -> ApplyResult:
    """Apply the definitions of entities and views in a file or folder, or these records."""
    if isinstance(what, str | Path):
        found = read_definitions(Path(what))
        return platform.features.apply(entities=tuple(found.entities), views=tuple(found.views), **where)
    records = (what,) if isinstance(what, Entity | FeatureView) else tuple(what)
    return platform.features.apply(
        entities=tuple(each for each in records if isinstance(each, Entity)),
        views=tuple(each for each in records if isinstance(each, FeatureView)),
        **where,
    )


def ingest(
    platform: Platform,
    view: str,
    rows: Rows,
    *,
    strict: bool = False,
    again: bool = False,
    backfill: bool = False,
    **where: Any,
) -> IngestResult:
    """Upload `rows` and add them to `view`; `where` are options of blobs.upload, the others of features.ingest."""
    staged = platform.blobs.upload(pieces(rows), **(view_location(platform, view) | where))
    return platform.features.ingest(view, data=staged.id, strict=strict, again=again, backfill=backfill)


def training_set(
    platform: Platform,
    name: str,
    *,
    spine: Rows,
    views: Sequence[str],
    since: datetime | None = None,
    until: datetime | None = None,
    **options: Any,
) -> TrainingSet:
    """Join a spine with `views`: a file or table, which is uploaded, or the name of a view, or a reference."""
    reference = spine_reference(spine)
    if reference is None:
        where = {key: options[key] for key in ("workspace", "zone") if options.get(key)}
        reference = platform.blobs.upload(pieces(spine), **where).id
    return platform.features.training_set(
        name, spine=reference, views=tuple(views), since=since, until=until, **options
    )


def view_location(platform: Platform, view: str) -> dict[str, Any]:
    """Return the workspace and zone of `view`, for uploads of its rows."""
    found = platform.features.show(view)
    return {"workspace": found.workspace, "zone": found.zone}


def spine_reference(spine: Rows) -> str | None:
    """Return the reference of `spine` on the platform; none if it is a local file, or rows."""
    if not isinstance(spine, str) or Path(spine).is_file():
        return None
    if ":" in spine or (spine.partition("_")[0] in ("blob", "view") and len(spine) > 26):
        return spine
    workspace, slash, name = spine.rpartition("/")
    return f"{workspace}{slash}view:{name}"


def pieces(rows: Rows) -> Iterator[bytes]:
    """Yield `rows` as bytes to upload."""
    from falaj.sdk.platform import chunks

    if isinstance(rows, str | Path):
        path = Path(rows)
        if not path.is_file():
            raise InvalidInput.at("rows", given=str(rows), allowed="a file that is there, or a table")
        return chunks(path)
    return chunks(_parquet(rows))


def _parquet(rows: Rows) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    if isinstance(rows, pa.RecordBatchReader):
        rows = rows.read_all()
    if not isinstance(rows, pa.Table):
        try:
            has_index = hasattr(rows, "index") or not hasattr(rows, "__arrow_c_stream__")  # pandas
            rows = pa.Table.from_pandas(rows, preserve_index=False) if has_index else pa.table(rows)
        except (AttributeError, TypeError, pa.ArrowException) as error:
            kind = f"{type(rows).__name__} ({error})"
            raise InvalidInput.at(
                "rows", given=kind, allowed="a file, a pyarrow Table or a DataFrame"
            ) from None
    sink = pa.BufferOutputStream()
    parquet.write_table(rows, sink, compression="zstd")
    written: bytes = sink.getvalue().to_pybytes()
    return written
