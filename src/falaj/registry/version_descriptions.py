"""Operations on what may change of model versions, and the search for versions of all models."""

from __future__ import annotations

from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.search.queries import search, search_scope
from falaj.governance.tables import objects as objects_table
from falaj.records.governance.objects import Cursor, Page, PageSize
from falaj.records.names import WorkspaceRef
from falaj.records.registry import Description, ModelVersion, ModelVersionRef, RemovedTags
from falaj.records.tracking import FilterText, Keys, Orders, Tags
from falaj.registry import descriptions
from falaj.registry.artifact_versions import OpenVersion


class ModelVersions:
    """Find versions of models, and describe and tag them. What is signed of a version never changes."""

    def __init__(self, gate: Gate, open_version: OpenVersion) -> None:
        self.gate = gate
        self._open_version = open_version

    @operation("modelversions.list", resource="workspace", mode=Mode.READ)
    def list(
        self,
        *,
        where: FilterText = "",
        order_by: Orders = (),
        workspace: WorkspaceRef | None = None,
        after: Cursor = "",
        limit: PageSize = 100,
    ) -> Page[ModelVersion]:
        """Search the versions of all models of a workspace; the newest come first unless `order_by` is given.

        `where` is like "name = 'churn' and version_number > 3 and tags.team = 'risk'". `run_id` is a version's run.
        """
        call = current_call()
        page = search(
            self.gate,
            descriptions.VERSIONS,
            search_scope(descriptions.VERSIONS, (), call.target, of=objects_table.c.id),
            where=where,
            order_by=order_by,
            view="all",
            after=after,
            limit=limit,
        )
        found = [self._open_version(call.tx, each) for each, _ in page.items]
        return Page(items=tuple(descriptions.annotated(call.tx, found)), next=page.next)

    @operation("modelversions.update", resource="model_version")
    def update(self, version: ModelVersionRef, *, description: Description) -> ModelVersion:
        """Describe a version in other words. Its card, its files and its facts are signed, and never change."""
        call = current_call()
        descriptions.annotate(call, call.target, description=description)
        return self._shown(call)

    @operation("modelversions.set_tags", resource="model_version")
    def set_tags(self, version: ModelVersionRef, tags: Tags) -> ModelVersion:
        """Set tags of a version; existing tags are replaced."""
        call = current_call()
        descriptions.annotate(call, call.target, new_tags=tags)
        return self._shown(call)

    @operation("modelversions.delete_tags", resource="model_version")
    def delete_tags(self, version: ModelVersionRef, keys: Keys) -> RemovedTags:
        """Delete tags of a version; NotFound if it has none of them."""
        return descriptions.delete_tags(current_call(), current_call().target, keys)

    def _shown(self, call: Call) -> ModelVersion:
        return descriptions.annotated(call.tx, [self._open_version(call.tx, call.target)])[0]
