"""The operations of the model registry: register, promote, approve, roll back, verify, read, export."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

from pydantic import AwareDatetime, Field

from falaj.errors import AlreadyExists, Conflict, FalajError, InvalidInput
from falaj.governance import objects
from falaj.governance.blobs.service import WorkflowRequests
from falaj.governance.lineage import graph
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ByteStream, Mode, operation
from falaj.governance.operations.pagination import visible_after
from falaj.governance.policy.implied_actions import ASSIGN
from falaj.governance.search.queries import search, search_scope
from falaj.governance.tables import objects as objects_table
from falaj.ports.keys import KeyService
from falaj.ports.metadata import Transaction
from falaj.ports.parsers import ParserPool
from falaj.records.control.workflows import WorkflowRun
from falaj.records.features import Column, DatasetRef
from falaj.records.governance.blobs import Blob
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.models.cards import ModelBom, ModelCard, VersionDiff
from falaj.records.models.facts import CodeReference, Licence, Packages, TrainingHardware
from falaj.records.models.gates import (
    CheckNames,
    EvaluationReport,
    GateCheckReport,
    GateRules,
    GateWaiver,
    MetricMeasurement,
    MetricRules,
    Reason,
)
from falaj.records.names import AnyRef, BlobRef, Name, WorkspaceRef, ZoneName
from falaj.records.registry import (
    Alias,
    AliasChange,
    AliasMove,
    AliasName,
    AliasState,
    Approval,
    BatchRows,
    CardText,
    Cpus,
    Description,
    Environment,
    ExportTarget,
    FileFormat,
    FilePath,
    GpuCount,
    MemoryBytes,
    Metrics,
    Model,
    ModelExport,
    ModelFile,
    ModelRef,
    ModelVersion,
    ModelVersionRef,
    Promotion,
    RemovedTags,
    StorageUri,
    TensorSpec,
    Text,
    VersionCheck,
    VersionKey,
)
from falaj.records.serving.ensembles import Ensemble
from falaj.records.tracking import ArtifactFolder, FilterText, Keys, Orders, RunRef, Tags
from falaj.records.training.jobs import JobRef
from falaj.registry import aliases, descriptions, store
from falaj.registry.artifact_versions import (
    ArtifactPlanner,
    read_mlflow_facts,
    require_own_run,
    version_format,
    with_safe_option,
)
from falaj.registry.cards.bom import bill_of_materials
from falaj.registry.cards.diff import diff_versions
from falaj.registry.cards.facts import FactReader
from falaj.registry.cards.markdown import model_card
from falaj.registry.dependencies import (
    EvaluationSource,
    GateCheck,
    LoggedFiles,
    NothingLogged,
    RunParams,
    no_params,
)
from falaj.registry.ensembles.composition import EnsembleComposer, LookupSource, document_file
from falaj.registry.exports.kserve import NodeTerms
from falaj.registry.exports.layout import ExportOptions, ExportSubject
from falaj.registry.exports.plan import plan_export, read_subject
from falaj.registry.files import (
    MODEL_FILE,
    PICKLED_FILE,
    ModelBlobSource,
    check_files,
    file_of,
    read_range,
    require_same,
    verified,
)
from falaj.registry.formats import model_format, require_signature
from falaj.registry.gates import store as gate_store
from falaj.registry.gates.computed import choose_target, plan_evaluation, record_evaluation
from falaj.registry.gates.evaluation import PromotionGates, record_metrics
from falaj.registry.registration import (
    inspect_files,
    model_object,
    pin_code,
    registered_blobs,
    require_consistent,
    require_placed,
    version_origins,
)
from falaj.registry.signed_versions import SignedVersions, signed_manifest, version_row
from falaj.registry.signing.versions import VersionSignatures

Position = Annotated[int, Field(ge=1, le=2**31)]
Files = Annotated[tuple[BlobRef, ...], Field(min_length=1, max_length=1000)]
Paths = Annotated[tuple[FilePath, ...], Field(max_length=1000)]
ProcessorCount = Annotated[int, Field(ge=1, le=1024)]
Tensors = Annotated[tuple[TensorSpec, ...], Field(max_length=1000)]


class Models:
    """Register model versions, and choose which of them is in use."""

    def __init__(
        self,
        gate: Gate,
        blobs: ModelBlobSource,
        keys: KeyService,
        *,
        parsers: ParserPool,
        lookups: LookupSource,
        intents: WorkflowRequests,
        evaluations: EvaluationSource,
        node_terms: NodeTerms = lambda _zones: [],
        params: RunParams = no_params,
        logged: LoggedFiles | None = None,
        checks: Mapping[str, GateCheck] | None = None,
    ) -> None:
        self.gate = gate
        self._node_terms = node_terms
        self._blobs = blobs
        self._signatures = VersionSignatures(keys)
        self._versions = SignedVersions(gate, self._signatures)
        self.open_version = self._versions.open
        self._parsers = parsers
        self._approval_policy = aliases.ApprovalPolicy(gate)
        self._composer = EnsembleComposer(gate, self._versions.open, self._read_subject, lookups)
        self._planner = ArtifactPlanner(gate, logged or NothingLogged(), self._versions.open)
        self._intents = intents
        self._evaluations = evaluations
        self._facts = FactReader(gate, params)
        self._gates = PromotionGates(self._facts, checks or {}, self._versions.by_id)

    @operation("models.register", resource="workspace", mode=Mode.LATE)
    def register(
        self,
        name: Name,
        *,
        files: Files,
        paths: Paths = (),
        workspace: WorkspaceRef | None = None,
        training_set: AnyRef | None = None,
        run: AnyRef | None = None,
        sources: tuple[AnyRef, ...] = (),
        inputs: Tensors = (),
        outputs: Tensors = (),
        metrics: Metrics | None = None,
        environment: Environment | None = None,
        packages: Packages = (),
        hardware: TrainingHardware | None = None,
        licence: Licence | None = None,
        example: FilePath | None = None,
        code: CodeReference | None = None,
        archive: BlobRef | None = None,
        card: CardText = "",
    ) -> ModelVersion:
        """Register uploaded blobs as the next version of a model, signed and immutable; create the model on first use.

        `paths` name the files in the version, in the order of `files`; by default they keep the names of their blobs.
        Training set, run and sources are the origins of the version: it inherits their restrictions. `example` names
        the file of the version with an example of its input. `code` names the code of a network whose weights these
        are; with `archive`, an uploaded archive that has it. A version of a job gets the other facts by itself.
        """
        call = current_call()
        with self.gate.database.read() as tx:
            blobs = require_placed(self.gate, call, tx, self._blobs, registered_blobs(call, archive))
        own, packed = blobs[: len(files)], next(iter(blobs[len(files) :]), None)
        inspected = self._inspect(call, own, paths, code=code)
        found = model_format([file.format for file in inspected])
        require_signature(found, inputs, outputs)
        self._signatures.prepare()
        require_consistent(inspected, packages, example)
        pinned = pin_code(code, inspected, packages, packed)
        facts: dict[str, object] = {"format": found, "files": tuple(inspected), "card": card, "code": pinned}
        facts |= {"inputs": inputs, "outputs": outputs, "metrics": metrics or {}, "example": example}
        facts |= {"environment": environment or {}, "packages": packages}
        facts |= {"hardware": hardware, "licence": licence}

        def publish() -> ModelVersion:
            if [found.id for found in registered_blobs(call, archive)] != [blob.id for blob in blobs]:
                raise Conflict("a blob's name was given to another blob; try again")
            for blob in require_placed(
                self.gate, call, call.tx, self._blobs, registered_blobs(call, archive)
            ):
                self._blobs.keep(call.tx, blob, now=call.now)
            origins = version_origins(call, training_set=training_set, run=run, sources=sources)
            return self._versions.add(call, name, zone=blobs[0].zone, facts=facts | origins)

        return self.gate.commit(call, publish)

    @operation("models.compose", resource="workspace", mode=Mode.LATE)
    def compose(
        self,
        name: Name,
        *,
        ensemble: Ensemble,
        workspace: WorkspaceRef | None = None,
        zone: ZoneName | None = None,
        metrics: Metrics | None = None,
        card: CardText = "",
    ) -> ModelVersion:
        """Register an ensemble as the next version of a model: a graph of model versions and lookups behind one name.

        Its steps are pinned to the versions that they name now, and every connection is checked: names, types, shapes.
        The version inherits the restrictions of its steps and views, and needs their approvals where it is served.
        """
        call = current_call()
        owner = call.object("workspace").name
        planned = self._composer.plan(call, ensemble, workspace=owner)
        place = self.gate.zones.named(call.zone)

        def require_origins(tx: Transaction) -> builtins.list[StoredObject]:
            origins = self._composer.origins(call, tx, ensemble, planned, workspace=owner)
            seen = partial(self.gate.authorizer.sees, tx, call.caller)
            self.gate.zones.require(tx, [*origins, call.target], place, seen=seen)
            return origins

        with self.gate.database.read() as tx:
            require_origins(tx)
        written = self._blobs.write(call.target.id, iter([planned.content()]), zone=place.name)
        composed = planned.composed

        def publish() -> ModelVersion:
            target = call.object("workspace")
            call.referred["steps"] = origins = require_origins(call.tx)
            self._blobs.publish(call, written, target.id)
            facts: dict[str, object] = {
                "format": FileFormat.ENSEMBLE,
                "files": (document_file(written),),
                "inputs": composed.inputs,
                "outputs": composed.gives,
                "metrics": metrics or {},
                "card": card,
                "sources": tuple(found.id for found in origins),
            }
            return self._versions.add(call, name, zone=place.name, facts=facts)

        return self.gate.commit(call, publish)

    @operation("models.register_artifacts", resource="workspace", mode=Mode.LATE)
    def register_artifacts(
        self,
        name: Name,
        *,
        workspace: WorkspaceRef | None = None,
        source: AnyRef,
        folder: ArtifactFolder = "",
        run: RunRef | None = None,
        description: Description = "",
        tags: Tags | None = None,
    ) -> ModelVersion:
        """Register the files in a folder of a run, of a logged model or of a version as the next version of a model.

        The files are not copied, and stay if the run is deleted. Where MLflow described the model, the version has its
        packages, and one without a model that is served is kept for MLflow's client. `run` must be the source's own.
        """
        call = current_call()
        with self.gate.database.read() as tx:
            planned = self._planner.plan(call, tx, call.object("source"), folder)
            require_own_run(planned, None if run is None else call.object("run").id)
            found = self._planner.blobs(tx, planned)
            blobs = require_placed(self.gate, call, tx, self._blobs, found)
        paths = planned.paths()
        described = read_mlflow_facts(blobs, paths, self._blobs, self._parsers, owner=call.caller.id)
        try:
            inspected = self._inspect(call, blobs, paths)
        except InvalidInput as error:
            raise with_safe_option(error, described) from None
        self._signatures.prepare()
        facts: dict[str, object] = {"format": version_format(inspected, described), "files": tuple(inspected)}
        facts |= {"packages": () if described is None else described.packages}

        def publish() -> ModelVersion:
            again = self._planner.plan(call, call.tx, call.object("source"), folder)
            if again.files != planned.files or again.run != planned.run:
                raise Conflict(f"the files of {source} were changed meanwhile; try again")
            call.referred["files"] = self._planner.blobs(call.tx, again)
            for blob in require_placed(self.gate, call, call.tx, self._blobs, call.referred["files"]):
                self._blobs.keep(call.tx, blob, now=call.now)
            origins = {"run": again.run, "sources": again.sources, "metrics": dict(again.metrics)}
            version = self._versions.add(call, name, zone=blobs[0].zone, facts=facts | origins)
            if description or tags:
                descriptions.annotate(call, call.created[-1], description=description, new_tags=tags)
            return descriptions.annotated(call.tx, [version])[0]

        return self.gate.commit(call, publish)

    @operation("models.create", resource="workspace")
    def create(
        self,
        name: Name,
        *,
        description: Description = "",
        tags: Tags | None = None,
        workspace: WorkspaceRef | None = None,
    ) -> Model:
        """Create a model without versions. Registering a version creates its model, too."""
        call = current_call()
        target = call.object("workspace")
        self.gate.named(call, "model", name, workspace=target)
        new = model_object(call, name, workspace=target)
        if store.find_or_create_model(call.tx, name, workspace=target, new=new) != new.id:
            raise AlreadyExists(f"there is a model {name!r} already")
        call.created.append(new)
        if description or tags:
            descriptions.annotate(call, new, description=description, new_tags=tags)
        return descriptions.model_records(call.tx, [new])[0]

    @operation("models.list", resource="workspace", mode=Mode.READ)
    def list(
        self,
        *,
        where: FilterText = "",
        order_by: Orders = (),
        workspace: WorkspaceRef | None = None,
        after: Cursor = "",
        limit: PageSize = 100,
    ) -> Page[Model]:
        """Search the models of a workspace, and where their aliases point; by name unless `order_by` is given.

        `where` is like "name LIKE 'churn%' and tags.team = 'risk'".
        """
        call = current_call()
        page = search(
            self.gate,
            descriptions.MODELS,
            search_scope(descriptions.MODELS, (), call.target, of=objects_table.c.id),
            where=where,
            order_by=order_by or ("name",),
            view="all",
            after=after,
            limit=limit,
        )
        items = descriptions.model_records(call.tx, [found for found, _ in page.items])
        return Page(items=tuple(items), next=page.next)

    @operation("models.show", resource="model", mode=Mode.READ)
    def show(self, model: ModelRef) -> Model:
        """Show a model, and where its aliases point."""
        call = current_call()
        return descriptions.model_records(call.tx, [call.object("model")])[0]

    @operation("models.update", resource="model")
    def update(self, model: ModelRef, *, description: Description) -> Model:
        """Describe a model in other words."""
        call = current_call()
        descriptions.annotate(call, call.target, description=description)
        return descriptions.model_records(call.tx, [call.target])[0]

    @operation("models.rename", resource="model")
    def rename(self, model: ModelRef, name: Name) -> Model:
        """Give a model without versions another name. The name of a version is signed with it, and stays."""
        call = current_call()
        descriptions.require_empty(
            call, "renamed", "copy its versions: models.register_artifacts, or copy_model_version of MLflow"
        )
        objects.rename(call.tx, call.target.id, name=name)
        descriptions.annotate(call, call.target)
        return descriptions.model_records(call.tx, [call.target.model_copy(update={"name": name})])[0]

    @operation("models.delete", resource="model", confirm=True)
    def delete(self, model: ModelRef) -> Model:
        """Delete a model without versions. A version is never deleted: lineage and the audit log refer to it."""
        call = current_call()
        descriptions.require_empty(
            call,
            "deleted",
            "tag it as no longer in use: models.set_tags, or set_registered_model_tag of MLflow",
        )
        gone = descriptions.model_records(call.tx, [call.target])[0]
        descriptions.delete_empty_model(call, call.target)
        objects.delete(call.tx, call.target.id, at=call.now)
        return gone

    @operation("models.set_tags", resource="model")
    def set_tags(self, model: ModelRef, tags: Tags) -> Model:
        """Set tags of a model; existing tags are replaced."""
        call = current_call()
        descriptions.annotate(call, call.target, new_tags=tags)
        return descriptions.model_records(call.tx, [call.target])[0]

    @operation("models.delete_tags", resource="model")
    def delete_tags(self, model: ModelRef, keys: Keys) -> RemovedTags:
        """Delete tags of a model; NotFound if it has none of them."""
        return descriptions.delete_tags(current_call(), current_call().target, keys)

    @operation("models.version", resource="model_version", mode=Mode.READ)
    def version(self, model: ModelVersionRef) -> ModelVersion:
        """Show one model version, such as churn@14."""
        call = current_call()
        return self._annotated(call, call.object("model"))

    @operation("models.versions", resource="model", mode=Mode.READ)
    def versions(
        self, model: ModelRef, *, before: Position | None = None, limit: PageSize = 100
    ) -> Page[ModelVersion]:
        """List the versions of a model, newest first."""
        call = current_call()
        target = call.object("model")
        seen = visible_after(
            self.gate,
            lambda conditions, position, count: store.version_objects(
                call.tx, target.id, before=position, limit=count, conditions=conditions
            ),
            lambda _, row: int(row["number"]),
            after=before,
            limit=limit + 1,
            kinds=["model_version"],
            workspace=target.workspace,
        )
        items = descriptions.annotated(call.tx, [self._versions.record(*each) for each in seen[:limit]])
        return Page(items=tuple(items), next=str(items[-1].number) if len(seen) > limit else None)

    @operation("models.latest", resource="model", mode=Mode.READ)
    def latest(self, model: ModelRef, *, aliases: tuple[AliasName, ...] = ()) -> Page[ModelVersion]:
        """Return the newest version of a model, and those that aliases of these names point at."""
        call = current_call()
        newest = store.version_objects(call.tx, call.target.id, before=None, limit=1)
        pointed = [store.version_at(call.tx, call.target.id, alias, at=None) for alias in aliases]
        named = [
            self._versions.object(call.tx, ident) for ident in dict.fromkeys(pointed) if ident is not None
        ]
        found = {each.id: each for each in [*(found for found, _ in newest), *named]}
        seen = [self._versions.open(call.tx, each) for each in self.gate.visible([*found.values()])]
        return Page(items=tuple(descriptions.annotated(call.tx, seen)))

    @operation("models.promote", resource="model_version")
    def promote(self, model: ModelVersionRef, *, to: AliasName) -> Promotion:
        """Point an alias at a version; the earlier target stays in the alias's history.

        A protected alias moves only to a version that an approver other than its author has approved for it. A policy
        may demand approvals too (`models.assign`). An alias with gates refuses a version that fails one of them.
        """
        call = current_call()
        version = self._versions.open(call.tx, call.object("model"))
        self._require_assignable(call, version, call.object("model"), to, AliasMove.PROMOTE)
        call.event_data["alias"] = to
        return aliases.promote(call, version, to, gates=self._gates)

    @operation("models.approve", resource="model_version", allow=Role.APPROVER)
    def approve(self, model: ModelVersionRef, *, alias: AliasName, comment: Text = "") -> Approval:
        """Approve a version that you did not make for an alias; the approval holds for this version and alias only.

        It keeps the evidence: digests of the manifest and of the model card as you see it, and the gates' results.
        """
        call = current_call()
        version = self._versions.open(call.tx, call.object("model"))
        return aliases.approve(call, version, alias, comment=comment, gates=self._gates)

    @operation("models.approvals", resource="model_version", mode=Mode.READ)
    def approvals(self, model: ModelVersionRef, *, alias: AliasName) -> Page[Approval]:
        """List the valid approvals of a version for an alias."""
        call = current_call()
        return Page(items=tuple(store.approvals_of(call.tx, call.object("model").id, alias)))

    @operation("models.protect", resource="model", allow=Role.ADMIN)
    def protect(self, model: ModelRef, *, alias: AliasName, independent: bool = False) -> Alias:
        """Protect an alias: it may move only to versions that someone other than their author has approved.

        independent: count only approvals of those whom the author did not appoint, directly or through others. This
        cannot be undone.
        """
        call = current_call()
        return aliases.protect(call, call.object("model").id, alias, independent=independent)

    @operation("models.rollback", resource="model")
    def rollback(self, model: ModelRef, *, alias: AliasName) -> Promotion:
        """Point an alias back at its previous version; the version that it leaves needs a new approval to return."""
        call = current_call()
        target = call.object("model")
        call.event_data["alias"] = alias
        to = aliases.rollback_target(call.tx, target, alias)
        found = self._versions.object(call.tx, to)
        version = self._versions.open(call.tx, found)
        self._require_assignable(call, version, found, alias, AliasMove.ROLLBACK)
        return aliases.roll_back(call, target, alias, to=version)

    @operation("models.remove_alias", resource="model", confirm=True)
    def remove_alias(self, model: ModelRef, *, alias: AliasName) -> AliasChange:
        """Let an alias point at no version. Its history stays; a protected alias cannot be removed."""
        call = current_call()
        call.event_data["alias"] = alias
        return aliases.remove(call, call.object("model"), alias)

    @operation("models.alias_history", resource="model", mode=Mode.READ)
    def alias_history(
        self, model: ModelRef, *, alias: AliasName, before: Position | None = None, limit: PageSize = 100
    ) -> Page[AliasChange]:
        """List every move of an alias, newest first: from which version to which, by whom and when."""
        call = current_call()
        found = store.changes(call.tx, call.object("model").id, alias, before=before, limit=limit + 1)
        items = tuple(found[:limit])
        return Page(items=items, next=str(items[-1].seq) if len(found) > limit else None)

    @operation("models.alias", resource="model", mode=Mode.READ)
    def alias(self, model: ModelRef, alias: AliasName, *, at: AwareDatetime | None = None) -> AliasState:
        """Show where an alias points, or pointed at a given time, since when, by whom, and on which evidence."""
        call = current_call()
        target, when = call.object("model"), at or call.now
        change = store.change_at(call.tx, target.id, alias, at=when)
        version = None if change is None or change.move is AliasMove.REMOVE else change.version
        return AliasState(model=target.name, alias=alias, at=when, version=version, change=change)

    @operation("models.gates", resource="model", mode=Mode.READ)
    def gates(self, model: ModelRef, *, alias: AliasName) -> GateRules:
        """Show the gates of an alias: what a version must meet before it is approved for it or promoted to it."""
        call = current_call()
        return gate_store.rules_of(call.tx, call.object("model").id, alias)

    @operation("models.set_gates", resource="model", allow=Role.ADMIN)
    def set_gates(
        self,
        model: ModelRef,
        *,
        alias: AliasName,
        metrics: MetricRules = (),
        on: DatasetRef | None = None,
        target: Column | None = None,
        checks: CheckNames = (),
    ) -> GateRules:
        """Replace the gates of an alias; without rules and checks it has none. Earlier gates stay in its history.

        A rule is like 'auc >= 0.9' or 'auc >= champion - 0.002', which compares with the version of the alias
        champion. With `on`, a training set, the metrics are those that `models.record_metrics` has for it; with
        `target`, a column of that set, those that `models.evaluate` has computed for it, and no others.
        """
        call = current_call()
        data = None if on is None else call.object("on")
        if target is not None:
            if data is None:
                raise InvalidInput.at("target", given=target, allowed="together with a training set (--on)")
            choose_target(call, self._evaluations, data, None, target=target)
        ident = None if data is None else data.id
        rules = GateRules(alias=alias, metrics=metrics, on=ident, target=target, checks=checks)
        return self._gates.set_rules(call, call.object("model").id, rules)

    @operation("models.check_gates", resource="model_version", mode=Mode.READ)
    def check_gates(self, model: ModelVersionRef, *, alias: AliasName) -> GateCheckReport:
        """Evaluate the gates of an alias for a version, without an effect."""
        call = current_call()
        version = self._versions.open(call.tx, call.object("model"))
        results = self._gates.results(call, version, alias)
        passed = not any(each.refuses for each in results)
        return GateCheckReport(version=version.reference, alias=alias, passed=passed, results=results)

    @operation("models.waive_gates", resource="model_version", allow=Role.ADMIN)
    def waive_gates(self, model: ModelVersionRef, *, alias: AliasName, reason: Reason) -> GateWaiver:
        """Let a version pass the gates of an alias that it fails now, for a reason that is kept.

        It holds for these results alone, until the version is rolled back. Of a protected alias, the author cannot.
        """
        call = current_call()
        version = self._versions.open(call.tx, call.object("model"))
        aliases.require_other(call, version, alias, doing="waive its gates")
        call.event_data["alias"] = alias
        return self._gates.waive(call, version, alias, reason=reason)

    @operation("models.record_metrics", resource="model_version")
    def record_metrics(
        self, model: ModelVersionRef, *, on: DatasetRef, metrics: Metrics, run: AnyRef | None = None
    ) -> MetricMeasurement:
        """Record metrics of a version on a pinned training set. A measurement is never changed."""
        call = current_call()
        version = self._versions.open(call.tx, call.object("model"))
        by_run = None if run is None else call.object("run").id
        return record_metrics(call, version, call.object("on").id, metrics, run=by_run)

    @operation("models.evaluate", resource="model_version")
    def evaluate(
        self,
        model: ModelVersionRef,
        *,
        on: DatasetRef,
        target: Column | None = None,
        against: AliasName | None = aliases.DEFAULT_ALIAS,
        cpus: ProcessorCount = 1,
        queue: Name = "default",
    ) -> WorkflowRun:
        """Compute the metrics of a version on a pinned training set, as a job: it predicts the column `target`.

        The version of the alias `against` is evaluated, too, unless it was before on this set and column. `target` is
        by default the only column that is no key, no time, of no view and no input of the model. Metrics that were
        computed are never changed.
        """
        call = current_call()
        version = self._versions.open(call.tx, call.object("model"))
        versions, data = [version], call.object("on")
        pointed = None if against is None else store.version_at(call.tx, version.model, against, at=None)
        if pointed is not None and pointed != version.id:
            versions.append(self._versions.by_id(call.tx, pointed))
        planned = plan_evaluation(self.gate, call, self._evaluations, versions, data, target=target)
        runs = {ident: run.model_dump(mode="json") for ident, run in planned.runs.items()}
        given = {"runs": runs, "data": data.id, "workspace": version.workspace, "cpus": cpus, "queue": queue}
        return self._intents.request(call, "models.evaluate", given)

    @operation(
        "models.record_evaluation", resource="model_version", allow=Role.OPERATOR, internal=True, emits=True
    )
    def record_evaluation(
        self, model: ModelVersionRef, *, on: DatasetRef, job: JobRef, report: EvaluationReport
    ) -> MetricMeasurement:
        """Record the metrics that a job computed; the controller does this for the user who asked for them."""
        call = current_call()
        version = self._versions.open(call.tx, call.object("model"))
        return record_evaluation(call, version, call.object("on"), call.object("job"), report)

    @operation("models.card", resource="model_version", mode=Mode.READ)
    def card(self, model: ModelVersionRef) -> ModelCard:
        """Show the model card of a version: its facts, those that are missing, and the card as Markdown."""
        call = current_call()
        return model_card(self._facts.read(call.tx, self._versions.open(call.tx, call.object("model"))))

    @operation("models.bom", resource="model_version", mode=Mode.READ)
    def bom(self, model: ModelVersionRef) -> ModelBom:
        """Show the bill of materials of a version, as CycloneDX 1.6: files, data, versions and packages."""
        call = current_call()
        version = self._versions.open(call.tx, call.object("model"))
        return bill_of_materials(self._facts.read(call.tx, version))

    @operation("models.diff", resource="model_version", mode=Mode.READ)
    def diff(self, model: ModelVersionRef, other: ModelVersionRef) -> VersionDiff:
        """Compare two versions: files, signature, metrics, parameters, packages, origins, hardware, licence, card."""
        call = current_call()
        before = self._versions.open(call.tx, call.object("model"))
        after = self._versions.open(call.tx, call.object("other"))
        return diff_versions(self._facts.read(call.tx, before), self._facts.read(call.tx, after))

    @operation("models.resolve", resource="model", mode=Mode.READ)
    def resolve(self, model: ModelRef, *, alias: AliasName, at: AwareDatetime | None = None) -> ModelVersion:
        """Return the version that an alias points at now, or pointed at at a given time."""
        call = current_call()
        target = call.object("model")
        when = "now" if at is None else f"at {at.isoformat()}"
        pointed = store.version_at(call.tx, target.id, alias, at=at)
        found = self._versions.object(call.tx, aliases.require_known(pointed, target.name, alias, when=when))
        if not self.gate.visible([found]):
            raise objects.unknown(f"{target.name}@{alias}", "model_version")
        return self._annotated(call, found)

    @operation("models.verify", resource="model_version", mode=Mode.FREE)
    def verify(self, model: ModelVersionRef) -> Iterator[VersionCheck]:
        """Check the signature of a version and the hashes of its files; stream the progress and then the result."""
        target = current_call().object("model")
        try:
            with self.gate.database.read() as tx:
                version = self._versions.open(tx, target)
        except FalajError as error:
            return iter([VersionCheck(version=target.name, finished=True, problems=(error.message,))])
        return check_files(version, self._blobs, self.gate.database)

    @operation("models.read", resource="model_version", mode=Mode.FREE)
    def read(self, model: ModelVersionRef, file: FilePath) -> ByteStream:
        """Stream the bytes of one file of a version, after verifying its signature. Discard them if the stream breaks.

        The last chunk is sent only after the hash of the whole file matches the manifest.
        """
        with self.gate.database.read() as tx:
            version = self._versions.open(tx, current_call().object("model"))
            found = file_of(version, file)
            blob = self._blobs.facts(tx, found.blob)
        require_same(found, blob)
        return verified(found, self._blobs.read(blob))

    @operation("models.export", resource="model_version", mode=Mode.LATE, allow=Role.VIEWER, exports=True)
    def export(
        self,
        model: ModelVersionRef,
        *,
        to: ExportTarget,
        storage_uri: StorageUri | None = None,
        cpus: Cpus | None = None,
        memory_bytes: MemoryBytes | None = None,
        gpus: GpuCount = 0,
        max_batch_rows: BatchRows = 64,
    ) -> ModelExport:
        """Lay a version out as its files, or for Triton, KServe or a machine without the platform, and sign it all.

        The bytes follow by models.read. It takes the right to read the files, and is recorded in the audit log and in
        lineage before they leave. `model_signing verify` of OpenSSF verifies the folder.
        """
        call = current_call()
        options = ExportOptions(
            storage_uri=storage_uri,
            cpus=cpus,
            memory_bytes=memory_bytes,
            gpus=gpus,
            max_batch_rows=max_batch_rows,
        )
        target = call.object("model")
        subject = self._read_subject(call, target, to)
        self._signatures.prepare()

        def record() -> ModelExport:
            found = call.object("model")
            if found.id != target.id:
                raise Conflict("the alias has moved to another version; try again")
            self.gate.require(call, "models.read", found)
            call.details["exported_to"] = to.value
            call.event_data["to"] = to.value
            graph.leave(call, [found])
            return plan_export(
                replace(subject, version=self._versions.open(call.tx, found)),  # its label may have changed
                signed_manifest(version_row(call.tx, found)),
                self._signatures,
                to=to,
                options=options,
                zones=self.gate.zones.all(),
                node_terms=self._node_terms,
            )

        return self.gate.commit(call, record)

    @operation("models.signing_key", resource="model_version", mode=Mode.READ)
    def signing_key(self, model: ModelVersionRef) -> VersionKey:
        """Return the public key that verifies `model.sig` of a version that was exported as files."""
        call = current_call()
        found = call.object("model")
        self._versions.open(call.tx, found)
        signed = signed_manifest(version_row(call.tx, found))
        key = self._signatures.key_of(signed)
        return VersionKey(version=found.name, fingerprint=key.fingerprint, pem=key.pem)

    def _read_subject(
        self, call: Call, target: StoredObject, to: ExportTarget | None = None
    ) -> ExportSubject:
        """Read the tensors of a version from its file, if the caller may read its files."""
        with self.gate.database.read() as tx:
            self.gate.require(call, "models.read", target, tx=tx)
            version = self._versions.open(tx, target)
            blobs = {file.path: self._blobs.facts(tx, file.blob) for file in version.files}
        for file in version.files:
            require_same(file, blobs[file.path])

        def read(file: ModelFile, offset: int, length: int) -> bytes:
            return read_range(self._blobs, blobs[file.path], offset, length)

        return read_subject(version, read, self._parsers, to=to, owner=call.caller.id)

    def _require_assignable(
        self, call: Call, version: ModelVersion, found: StoredObject, alias: str, move: AliasMove
    ) -> None:
        """Raise Denied if a policy forbids that `alias` points at `version`, with the approvals that it has."""
        doing = f"point {alias} at {version.reference}"
        besides = {"alias": alias, "move": str(move)}
        self._approval_policy.require(call, ASSIGN, found, version, doing=doing, besides=besides)

    def _inspect(
        self, call: Call, blobs: Sequence[Blob], paths: Sequence[str], *, code: CodeReference | None = None
    ) -> builtins.list[ModelFile]:
        """Inspect files before they are registered; pickles are refused unless a policy allows the caller to."""
        with self.gate.database.read() as tx:
            parser = PICKLED_FILE if self._versions.may_pickle(call, tx) else MODEL_FILE
        return inspect_files(
            blobs, paths, self._blobs, self._parsers, owner=call.caller.id, parser=parser, code=code
        )

    def _annotated(self, call: Call, found: StoredObject) -> ModelVersion:
        return descriptions.annotated(call.tx, [self._versions.open(call.tx, found)])[0]
