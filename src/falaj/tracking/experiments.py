"""Operations on experiments: create, search, rename, tag, delete and restore them."""

from __future__ import annotations

from falaj.errors import AlreadyExists, Conflict
from falaj.governance import objects
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.search.queries import search, search_scope
from falaj.governance.tables import objects as objects_table
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import WorkspaceRef, new_id
from falaj.records.tracking import (
    Experiment,
    ExperimentName,
    ExperimentRef,
    FilterText,
    Keys,
    Lifecycle,
    LogResult,
    Orders,
    Tags,
)
from falaj.tracking import store
from falaj.tracking.search import EXPERIMENTS
from falaj.tracking.tables import tags as tags_table


class Experiments:
    """Experiments: groups of runs under one name."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("experiments.create", resource="workspace")
    def create(
        self, name: ExperimentName, *, tags: Tags | None = None, workspace: WorkspaceRef | None = None
    ) -> Experiment:
        """Create an experiment; AlreadyExists if there is one of that name, also a deleted one."""
        call = current_call()
        store.lock_names(call.tx, call.target.id)
        found = self.gate.named(call, "experiment", name, workspace=call.target)
        if found is not None:
            is_deleted = store.experiment_deleted_at(call.tx, found.id) is not None
            state = "deleted, and can be restored" if is_deleted else "there already"
            raise AlreadyExists(f"experiment {name!r} is {state}: {found.id}", details={"id": found.id})
        new = call.create("experiment", name, workspace=call.target)
        store.create_experiment(call.tx, new)
        store.put_values(call.tx, tags_table, new.id, tags or {})
        return _record(call, new)

    @operation("experiments.show", resource="experiment", mode=Mode.READ)
    def show(self, experiment: ExperimentRef) -> Experiment:
        """Show an experiment, also a deleted one."""
        return _record(current_call(), current_call().target)

    @operation("experiments.find", resource="workspace", mode=Mode.READ)
    def find(self, name: ExperimentName, *, workspace: WorkspaceRef | None = None) -> Experiment:
        """Return the experiment of exactly this name, which may have any characters."""
        call = current_call()
        found = self.gate.named(call, "experiment", name, workspace=call.target)
        if found is None:
            raise objects.unknown(name, "experiment")
        return _record(call, found)

    @operation("experiments.list", resource="workspace", mode=Mode.READ)
    def list(
        self,
        *,
        where: FilterText = "",
        order_by: Orders = (),
        view: Lifecycle = "active",
        workspace: WorkspaceRef | None = None,
        after: Cursor = "",
        limit: PageSize = 100,
    ) -> Page[Experiment]:
        """Search the experiments of a workspace; the newest come first unless `order_by` is given.

        `where` is like "name LIKE 'churn%' and tags.team = 'risk'".
        """
        call = current_call()
        page = search(
            self.gate,
            EXPERIMENTS,
            search_scope(EXPERIMENTS, (), call.target, of=objects_table.c.id),
            where=where,
            order_by=order_by,
            view=view,
            after=after,
            limit=limit,
        )
        found = store.experiment_records(call.tx, [found for found, _ in page.items])
        return Page(items=tuple(found), next=page.next)

    @operation("experiments.rename", resource="experiment")
    def rename(self, experiment: ExperimentRef, name: ExperimentName) -> Experiment:
        """Give an experiment another name."""
        call = current_call()
        _require_active(call)
        objects.rename(call.tx, call.target.id, name=name)
        store.change_experiment(call.tx, call.target, now=call.now)
        return _record(call, call.target.model_copy(update={"name": name}))

    @operation("experiments.set_tags", resource="experiment")
    def set_tags(self, experiment: ExperimentRef, tags: Tags) -> Experiment:
        """Set tags of an experiment; existing tags are replaced."""
        call = current_call()
        _require_active(call)
        store.put_values(call.tx, tags_table, call.target.id, tags)
        store.change_experiment(call.tx, call.target, now=call.now)
        return _record(call, call.target)

    @operation("experiments.delete_tags", resource="experiment")
    def delete_tags(self, experiment: ExperimentRef, keys: Keys) -> LogResult:
        """Delete tags of an experiment; NotFound if it has none of them."""
        call = current_call()
        _require_active(call)
        store.change_experiment(call.tx, call.target, now=call.now)
        return store.delete_tags(call, keys)

    @operation("experiments.delete", resource="experiment", confirm=True)
    def delete(self, experiment: ExperimentRef) -> Experiment:
        """Delete an experiment with its runs. It can be restored until it is removed for good, and keeps its name."""
        call = current_call()
        if store.experiment_deleted_at(call.tx, call.target.id) is None:
            store.change_experiment(call.tx, call.target, now=call.now, deleted_at=call.now)
        return _record(call, call.target)

    @operation("experiments.restore", resource="experiment")
    def restore(self, experiment: ExperimentRef) -> Experiment:
        """Restore a deleted experiment, and the runs that were deleted with it."""
        call = current_call()
        if store.experiment_deleted_at(call.tx, call.target.id) is not None:
            store.change_experiment(call.tx, call.target, now=call.now, deleted_at=None)
        return _record(call, call.target)


def find_or_create(gate: Gate, call: Call, text: str, *, home: StoredObject) -> StoredObject:
    """Return the experiment with this id, or of this name in `home`, which is created if there is none.

    It is not created by `call.create`: the run's sources are not its own.
    """
    found = _by_id(gate, call, text) if objects.is_id(text) else None
    found = found or gate.named(call, "experiment", text, workspace=home)
    if found is None:
        store.lock_names(call.tx, home.id)
        found = gate.named(call, "experiment", text, workspace=home)  # another call may have created it
    if found is not None:
        if store.experiment_deleted_at(call.tx, found.id) is not None:
            raise Conflict(f"experiment {found.name!r} is deleted; restore it first: experiments.restore")
        return found
    new = StoredObject(
        id=new_id("experiment"),
        workspace=home.id,
        kind="experiment",
        name=text,
        owner=call.caller.id,
        label=home.label,
        created_at=call.now,
    )
    objects.create(call.tx, new)
    store.create_experiment(call.tx, new)
    return new


def _by_id(gate: Gate, call: Call, ident: str) -> StoredObject:
    found = objects.by_id(call.tx, ident)
    if found is None or found.kind != "experiment" or not gate.authorizer.sees(call.tx, call.caller, found):
        raise objects.unknown(ident, "experiment")
    return found


def _require_active(call: Call) -> None:
    if store.experiment_deleted_at(call.tx, call.target.id) is not None:
        raise Conflict(f"experiment {call.target.name!r} is deleted; restore it first: experiments.restore")


def _record(call: Call, found: StoredObject) -> Experiment:
    return store.experiment_records(call.tx, [found])[0]
