"""Apply definitions: store new versions of views, each with the rows of the last one that fit it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from falaj.errors import Conflict, InvalidInput, ResidencyDenied
from falaj.features import store
from falaj.features.backends import FeatureBackends
from falaj.features.definitions import GivenDefinitions, keys_of, plan, stated
from falaj.features.sources import stored_columns
from falaj.features.table_versions import files as table_files
from falaj.features.views import stored_rows, writing_turn
from falaj.governance import objects
from falaj.governance.audit.deep import TABLE
from falaj.governance.encryption.keyring import require_living_key
from falaj.governance.operations.call import Call
from falaj.ports.metadata import Transaction
from falaj.ports.tables import TableVersion
from falaj.records.features import ApplyResult, ChangeKind, ColumnType, Feature, FeatureView, StoredView
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.residency import Zone


def apply_definitions(
    backends: FeatureBackends, call: Call, workspace: StoredObject, given: GivenDefinitions, zone: Zone
) -> ApplyResult:
    """Apply the plan to workspace `workspace`. An existing entity must not change, because views depend on it.

    Rows that new versions take over are copied first, while nobody adds to them, and published with the definitions.
    """
    database = backends.gate.database
    with ExitStack() as turns:
        with database.read() as tx:
            growing = _growing_views(backends, call, tx, workspace, given)
        for before, _ in sorted(growing, key=lambda pair: pair[0].id):
            turns.enter_context(writing_turn(backends, before))
        with database.read() as tx:
            growing = _growing_views(backends, call, tx, workspace, given)
        copied = {before: (after, _copy_rows(backends, before, after)) for before, after in growing}

        def publish() -> ApplyResult:
            return _apply(backends, call, call.object("workspace"), given, zone, copied)

        return backends.gate.commit(call, publish)


def _growing_views(
    backends: FeatureBackends, call: Call, tx: Transaction, workspace: StoredObject, given: GivenDefinitions
) -> list[tuple[StoredView, StoredView]]:
    """Return the last versions of the views whose rows are taken over, each with the version that comes next."""
    find = partial(backends.gate.named, call, workspace=workspace, tx=tx)
    changes = {each.name: each for each in plan(tx, workspace, given, find) if each.kind == "view"}
    known = {entity.name: entity for entity in given.entities}
    found = []
    for view in given.views:
        if changes[view.name].kept_rows:
            before = store.load_view(tx, _existing(tx, workspace, view.name))
            keys = keys_of(tx, workspace, view, known)
            found.append((before, _following(before, stated(view, before), keys)))
    return found


def _following(before: StoredView, given: FeatureView, keys: tuple[Feature, ...]) -> StoredView:
    """Return the version after `before`, without rows."""
    new = {"version": before.version + 1, "definition": given, "keys": keys}
    return before.model_copy(update={**new, "table_version": None, "rows": 0, "online_version": None})


def _apply(
    backends: FeatureBackends,
    call: Call,
    workspace: StoredObject,
    given: GivenDefinitions,
    zone: Zone,
    copied: Mapping[StoredView, tuple[StoredView, TableVersion]],
) -> ApplyResult:
    changes = plan(call.tx, workspace, given, partial(backends.gate.named, call, workspace=workspace))
    kinds = {(each.kind, each.name): each.change for each in changes}
    for entity in given.entities:
        if kinds["entity", entity.name] is ChangeKind.NEW:
            store.add_entity(call, call.create("entity", entity.name, workspace=workspace), entity)
    if _growing_views(backends, call, call.tx, workspace, given) != [
        (before, after) for before, (after, _) in copied.items()
    ]:
        raise Conflict("a view was changed by someone else at the same time; try again")
    for view in given.views:
        _apply_view(call, workspace, view, kinds["view", view.name], zone)
    for before, (after, written) in copied.items():
        _publish_rows(backends, call, before, after, written)
    now = tuple(store.load_view(call.tx, _existing(call.tx, workspace, view.name)) for view in given.views)
    new = tuple(entity.name for entity in given.entities if kinds["entity", entity.name] is ChangeKind.NEW)
    return ApplyResult(entities=new, views=now, changes=changes)


def _existing(tx: Transaction, workspace: StoredObject, name: str) -> StoredObject:
    return objects.resolve(tx, name, kind="view", workspace=workspace.name)


def _apply_view(
    call: Call, workspace: StoredObject, given: FeatureView, change: ChangeKind, zone: Zone
) -> None:
    """Store a new version of the view if it changed."""
    keys = keys_of(call.tx, workspace, given, {})
    found = objects.by_name(call.tx, workspace=workspace.id, kind="view", name=given.name)
    if found is None:
        if not given.own_label.permits(zone.jurisdiction):
            subject = f"view {given.name} ({given.own_label.describe()})"
            raise ResidencyDenied(f"{subject} may not lie in zone {zone.name} ({zone.jurisdiction})")
        found = call.create("view", given.name, workspace=workspace, zone=zone.name, own=given.own_label)
        store.add_view(call, found.id, 1, stated(given, None), keys)
    elif change is ChangeKind.CHANGED:
        before = store.load_view(call.tx, found)
        store.add_view(call, found.id, before.version + 1, stated(given, before), keys)


def _copy_rows(backends: FeatureBackends, before: StoredView, after: StoredView) -> TableVersion:
    """Write the rows of `before` in the columns of `after`, as its table; nothing is published.

    Raise InvalidInput if a number does not fit the new type of its column exactly.
    """
    from falaj.features import arrow_tables

    rows, types = stored_rows(backends, before), _types(before)
    for name, kind in _types(after).items():
        if types.get(name, kind) is not kind and not arrow_tables.fits(rows, name, kind):
            raise InvalidInput.at(
                f"view {after.definition.name}.{name}",
                given=f"values of version {before.version} that no {kind} equals",
                allowed="a type that has all of them",
                fix="keep the type, or apply with keep_rows none, and ingest the rows again",
            )
    return backends.tables[before.zone].overwrite(
        store.view_table(after), arrow_tables.with_columns(rows, stored_columns(after))
    )


def _publish_rows(
    backends: FeatureBackends, call: Call, before: StoredView, after: StoredView, written: TableVersion
) -> None:
    """Publish what `_copy_rows` wrote, with the uploads that it came from."""
    table, tables = store.view_table(after), backends.tables[after.zone]
    require_living_key(call.tx, after.workspace)
    table_files.require_stored(tables, table, written)
    table_files.publish_version(call.tx, table, written)
    store.publish_rows(call, after, table_version=written.number, rows=before.rows)
    store.copy_ingestions(call, before, after)
    call.publish(TABLE, f"{after.zone}/{table}", version=written.number, digest=written.digest)


def _types(view: StoredView) -> dict[str, ColumnType]:
    return {column.name: column.type for column in view.definition.columns}
