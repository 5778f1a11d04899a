"""Descriptions and tags of models and versions: what may change of them, and what both are searched by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import delete, func, insert, literal, select, update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement

from falaj.errors import Conflict, NotFound
from falaj.governance.objects import RowsByIds
from falaj.governance.operations.call import Call
from falaj.governance.search.filters import ValueKind, Vocabulary
from falaj.governance.search.queries import KeyedValues, Searched, listed_query
from falaj.governance.tables import objects
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.registry import Model, ModelVersion, RemovedTags
from falaj.records.tracking import Tag
from falaj.registry import aliases, store
from falaj.registry.tables import models, notes, tags, versions

MOST_TAGS = 1000
"""Tags of one model or version."""

_notes = RowsByIds(select(notes), notes.c.id)
_tags = RowsByIds(select(tags), tags.c.object)


# ---------------------------------------------------------------------------------------------- reading


def model_records(tx: Transaction, page: Sequence[StoredObject]) -> list[Model]:
    """Return models with their aliases, descriptions and tags."""
    idents = [found.id for found in page]
    counts, pointed = store.version_counts(tx, idents), aliases.aliases_of(tx, idents)
    described, tagged = _by_object(tx, idents)
    return [
        Model(
            id=found.id,
            workspace=found.workspace,
            name=found.name,
            versions=counts[found.id],
            aliases=pointed[found.id],
            created_at=found.created_at,
            **_soft(described.get(found.id), tagged.get(found.id, [])),
        )
        for found in page
    ]


def annotated(tx: Transaction, found: Sequence[ModelVersion]) -> list[ModelVersion]:
    """Return versions with what is not signed: description, tags, and the aliases that point at them."""
    described, tagged = _by_object(tx, [each.id for each in found])
    pointed: dict[tuple[str, str], list[str]] = {}
    for model, listed in aliases.aliases_of(tx, sorted({each.model for each in found})).items():
        for alias in listed:
            pointed.setdefault((model, alias.version or ""), []).append(alias.alias)
    return [
        each.model_copy(
            update={
                "aliases": tuple(pointed.get((each.model, each.reference), ())),
                **_soft(described.get(each.id), tagged.get(each.id, [])),
            }
        )
        for each in found
    ]


def _by_object(
    tx: Transaction, idents: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, list[Tag]]]:
    described = {row["id"]: row for row in _notes.fetch(tx, idents)}
    tagged: dict[str, list[Tag]] = {}
    for row in _tags.fetch(tx, idents):
        tagged.setdefault(row["object"], []).append(Tag(key=row["key"], value=row["value"]))
    return described, tagged


def _soft(described: Mapping[str, Any] | None, tagged: Sequence[Tag]) -> dict[str, Any]:
    return {
        "description": "" if described is None else described["description"],
        "updated_at": None if described is None else described["updated_at"],
        "tags": tuple(sorted(tagged, key=lambda tag: tag.key)),
    }


# --------------------------------------------------------------------------------------------- changing


def annotate(
    call: Call,
    found: StoredObject,
    *,
    description: str | None = None,
    new_tags: Mapping[str, str] | None = None,
) -> None:
    """Describe a model or version anew, and add tags to it or replace them; the rest stays."""
    tx = call.tx
    known = tx.execute(select(notes.c.description).where(notes.c.id == found.id).with_for_update()).first()
    if known is None:
        row = {"id": found.id, "description": description or "", "updated_at": call.now}
        tx.execute(insert(notes), row)
    else:
        changed = {} if description is None else {"description": description}
        tx.execute(update(notes).where(notes.c.id == found.id).values(updated_at=call.now, **changed))
    if new_tags:
        _put_tags(tx, found, new_tags)


def _put_tags(tx: Transaction, found: StoredObject, given: Mapping[str, str]) -> None:
    rows = tx.execute(select(tags.c.key, tags.c.value).where(tags.c.object == found.id)).mappings()
    known: dict[str, str] = {row["key"]: row["value"] for row in rows}
    if len(known.keys() | given.keys()) > MOST_TAGS:
        raise Conflict(
            f"{found.name} would have {len(known.keys() | given.keys())} tags; at most {MOST_TAGS} are kept"
        )
    for key, value in given.items():
        if key not in known:
            tx.execute(insert(tags), {"object": found.id, "key": key, "value": value})
        elif known[key] != value:
            tx.execute(update(tags).where(tags.c.object == found.id, tags.c.key == key).values(value=value))


def delete_tags(call: Call, found: StoredObject, keys: Sequence[str]) -> RemovedTags:
    """Delete tags of a model or version; NotFound if it has none of them."""
    condition = tags.c.object == found.id, tags.c.key.in_(keys)
    known = set(call.tx.execute(select(tags.c.key).where(*condition)).scalars())
    if not known:
        raise NotFound(f"{found.name} has no tag {', '.join(map(repr, keys[:20]))}")
    call.tx.execute(delete(tags).where(*condition))
    annotate(call, found)
    return RemovedTags(name=found.name, keys=tuple(key for key in keys if key in known))


def delete_empty_model(call: Call, model: StoredObject) -> None:
    """Remove what is kept of a model without versions, beside its object."""
    for table, owner in ((tags, tags.c.object), (notes, notes.c.id), (models, models.c.id)):
        call.tx.execute(delete(table).where(owner == model.id))


# -------------------------------------------------------------------------------------------- searching


class ManifestText(FunctionElement[str]):
    """A text of a version's manifest, by its name; null where it has none."""

    inherit_cache = True


@compiles(ManifestText, "sqlite")
def _in_sqlite(element: Any, compiler: Any, **options: Any) -> str:
    manifest, name = element.clauses
    return str(compiler.process(func.json_extract(manifest, literal("$.") + name), **options))


@compiles(ManifestText, "postgresql")
def _in_postgres(element: Any, compiler: Any, **options: Any) -> str:
    manifest, name = element.clauses
    return f"(CAST({compiler.process(manifest, **options)} AS json) ->> {compiler.process(name, **options)})"


_TIMES = {
    **dict.fromkeys(("creation_timestamp", "created_at"), "created_at"),
    **dict.fromkeys(("last_updated_timestamp", "timestamp", "updated_at"), "updated_at"),
}
_TIME_KINDS = {"created_at": ValueKind.TIME, "updated_at": ValueKind.TIME}
_UPDATED = func.coalesce(notes.c.updated_at, objects.c.created_at)
_NO_PROMPT = {"mlflow.prompt.is_prompt": literal("false")}
"""Clients of MLflow 3 keep prompts as models, and leave those out by this tag."""

MODELS = Searched(
    kind="model",
    words=Vocabulary(frozenset({"tags", "attributes"}), {"name": "name", **_TIMES}, _TIME_KINDS),
    query=listed_query(_UPDATED.label("updated_at"))
    .join(models, models.c.id == objects.c.id)
    .outerjoin(notes, notes.c.id == objects.c.id),
    id=objects.c.id,
    attributes={"name": objects.c.name, "created_at": objects.c.created_at, "updated_at": _UPDATED},
    values={"tags": KeyedValues(tags, "object")},
    tags=_NO_PROMPT,
)

_model_objects = objects.alias("model_objects")
VERSIONS = Searched(
    kind="model_version",
    words=Vocabulary(
        frozenset({"tags", "attributes"}),
        {
            "name": "name",
            "run_id": "run",
            "run": "run",
            **dict.fromkeys(("version_number", "version", "number"), "number"),
            **_TIMES,
        },
        {"number": ValueKind.NUMBER, **_TIME_KINDS},
    ),
    query=listed_query(
        *(column.label(f"version_{column.name}") for column in versions.c), _UPDATED.label("updated_at")
    )
    .join(versions, versions.c.id == objects.c.id)
    .join(_model_objects, _model_objects.c.id == versions.c.model)
    .outerjoin(notes, notes.c.id == objects.c.id),
    id=objects.c.id,
    attributes={
        "name": _model_objects.c.name,
        "number": versions.c.number,
        "run": ManifestText(versions.c.manifest, literal("run")),
        "created_at": objects.c.created_at,
        "updated_at": _UPDATED,
    },
    values={"tags": KeyedValues(tags, "object")},
    tags=_NO_PROMPT,
)


def require_empty(call: Call, what: str, instead: str) -> None:
    """Raise Conflict if the model that the call acts on has versions."""
    if store.has_versions(call.tx, call.target.id):
        raise Conflict(f"{call.target.name} has versions, and cannot be {what}; {instead}")
