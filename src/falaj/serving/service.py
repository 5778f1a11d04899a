"""The operations of serving: endpoints, their routes, logged predictions and feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated

from pydantic import AwareDatetime, Field

from falaj.errors import Conflict, Denied, InvalidInput
from falaj.governance import objects
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.lineage import graph
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ByteStream, Mode, operation
from falaj.governance.operations.pagination import list_page
from falaj.ports.metadata import Transaction
from falaj.ports.parsers import ParserPool
from falaj.records.control.replicas import ServerReplicas
from falaj.records.features import ViewRef
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import DEFAULT_WORKSPACE, Name, ObjectId, WorkspaceRef, ZoneName
from falaj.records.optimization import VariantChoice
from falaj.records.registry import AliasName, ModelVersion, ModelVersionRef
from falaj.records.serving.endpoints import (
    DeployedEndpoint,
    EndpointRef,
    LoadProblem,
    Route,
    Routes,
    ScoringRule,
    ServedRoute,
    StickyKey,
)
from falaj.records.serving.lookups import Lookup
from falaj.records.serving.predictions import (
    AnnouncedPredictions,
    FeedbackResult,
    GroundTruth,
    InferenceResult,
    InferInput,
    PredictionBatch,
    PredictionRecord,
    PredictionRef,
)
from falaj.records.serving.settings import (
    BurstSize,
    DelayMs,
    Device,
    EngineName,
    MeasuredVersion,
    QueueMs,
    RequestRate,
    RowCount,
    RunCount,
    ServingSettings,
    TimeoutMs,
)
from falaj.records.serving.shadows import ShadowCounts, ShadowReport
from falaj.records.serving.statistics import (
    EndpointObservations,
    EndpointStats,
    ReportReceipt,
    ServerLoad,
    VersionCounts,
)
from falaj.serving import store, validation
from falaj.serving.dependencies import (
    ChooseVariant,
    LoadVersion,
    LoadView,
    ModelServerClient,
    TrainingFacts,
    VersionApprovals,
)
from falaj.serving.feedback import score_labels
from falaj.serving.inference import request_inference
from falaj.serving.lookups.versions import (
    Column,
    ImputedValue,
    VersionLookups,
    has_imputation,
    known_values,
)
from falaj.serving.prediction_log import PredictionLog, announce_predictions
from falaj.serving.protection import EndpointProtection

MODEL_SERVER = "model-server"
"""The service account of the model server."""

LOADED_ENDPOINTS = 1000
"""Endpoints of a workspace whose load is shown."""

Outcomes = Annotated[tuple[GroundTruth, ...], Field(min_length=1, max_length=10_000)]
Inputs = Annotated[tuple[InferInput, ...], Field(min_length=1, max_length=1000)]
RequestId = Annotated[str, Field(max_length=256)]
BatchName = Annotated[str, Field(pattern=r"^predictions_[0-9a-z]{26}$")]
Count = Annotated[int, Field(ge=1, le=10_000_000)]
ObservationNumber = Annotated[int, Field(ge=0)]


class Endpoints:
    """Serve model versions under a name, and read their statistics."""

    def __init__(
        self,
        gate: Gate,
        *,
        stores: Mapping[str, EncryptedBlobs],
        versions: LoadVersion,
        approvals: VersionApprovals,
        views: LoadView,
        training: TrainingFacts,
        variants: ChooseVariant,
        server: ModelServerClient,
        parsers: ParserPool,
    ) -> None:
        """`stores` are keyed by zone."""
        self.gate = gate
        self._prediction_log = PredictionLog(gate, stores, parsers)
        self._versions = versions
        self._protection = EndpointProtection(approvals, self._steps)
        self._views = views
        self._version_lookups = VersionLookups(gate, training)
        self._variants = variants
        self._server = server

    @operation("endpoints.deploy", resource="workspace", mode=Mode.LATE)
    def deploy(
        self,
        name: Name,
        *,
        model: ModelVersionRef,
        variant: VariantChoice = "original",
        lookup: Lookup | None = None,
        scoring: ScoringRule | None = None,
        workspace: WorkspaceRef | None = None,
        zone: ZoneName | None = None,
    ) -> DeployedEndpoint:
        """Route all requests of an endpoint to one model version; create the endpoint on first use.

        `variant` chooses one that was accepted for this CPU in place of the version: the fastest with `auto`, or that
        of a recipe. It is a version of its own, and needs approvals of its own.
        `lookup` and `scoring` stay unchanged unless given. Features that are imputed get typical values of the
        version's training set, or of the view, which are read now. Scoring is log loss or squared error; by default
        the first labels decide. A protected endpoint serves only versions that were approved for its alias; a policy
        may demand approvals too (`endpoints.serve`).
        """
        call = current_call()
        validation.require_name(name)
        owner = call.object("workspace")
        with self.gate.database.read() as tx:
            found = self.gate.named(call, "endpoint", name, workspace=owner, tx=tx)
            self.gate.require(call, "models.read", call.object("model"), tx=tx)
            version = self._variants(tx, call.object("model"), variant)
        values = self._imputed_values(call, found, [version], lookup, workspace=owner.name)
        deploy = partial(
            self._deploy, call, name, version, lookup=lookup, scoring=scoring, zone=zone, values=values
        )
        made = self.gate.commit(call, deploy)
        self._server.wake()
        return made

    def _deploy(
        self,
        call: Call,
        name: str,
        version: StoredObject,
        *,
        lookup: Lookup | None,
        scoring: ScoringRule | None,
        zone: str | None,
        values: Mapping[Column, ImputedValue],
    ) -> DeployedEndpoint:
        owner = call.object("workspace")
        found = self.gate.named(call, "endpoint", name, workspace=owner)
        new = found is None
        zone_name = self.gate.zones.named(zone).name
        target = found or call.create("endpoint", name, workspace=owner, zone=zone_name)
        call.event_data |= {"endpoint": name, "version": version.name}
        routes = validation.served_routes([Route(version=version.name)], [version])
        kept = None if new else store.endpoint_record(call.tx, target)
        self._put(call, target, routes, [version], lookup=lookup, scoring=scoring, before=kept, values=values)
        if version.id != call.object("model").id:
            graph.flow(call, [version], target)
        return self._record(call, target.id)

    @operation("endpoints.route", resource="endpoint", mode=Mode.LATE)
    def route(
        self, endpoint: EndpointRef, *, routes: Routes, sticky: StickyKey | None = None
    ) -> DeployedEndpoint:
        """Split the requests of an endpoint among versions of its model, by weight.

        `sticky` says where the key is that decides about the version: one key always gets the same version while the
        weights stay the same. It stays unchanged unless given. A route with `shadow` gets copies of so many percent of
        the requests and never answers; the one with `fallback` answers where the chosen version fails.

        A protected endpoint serves only versions that were approved for its alias, whatever their weight.
        """
        call = current_call()
        validation.require_routes(routes)
        target = call.object("endpoint")
        with self.gate.database.read() as tx:
            found = self._routed_versions(tx, target, routes)
        values = self._imputed_values(call, target, found, None)
        return self.gate.commit(call, partial(self._route, call, routes, sticky=sticky, values=values))

    def _route(
        self,
        call: Call,
        routes: Sequence[Route],
        *,
        sticky: StickyKey | None,
        values: Mapping[Column, ImputedValue],
    ) -> DeployedEndpoint:
        target = call.object("endpoint")
        before = store.endpoint_record(call.tx, target)
        found = self._routed_versions(call.tx, target, routes)
        served = validation.served_routes(routes, found)
        self._put(
            call,
            target,
            served,
            found,
            lookup=None,
            scoring=None,
            before=before,
            sticky=sticky,
            values=values,
        )
        return self._record(call, target.id)

    def _routed_versions(
        self, tx: Transaction, target: StoredObject, routes: Sequence[Route]
    ) -> list[StoredObject]:
        before = store.endpoint_record(tx, target)
        served_now = objects.by_id(tx, before.routes[0].id) or target
        return validation.resolve_versions(tx, routes, model=before.model, served=served_now)

    def _imputed_values(
        self,
        call: Call,
        endpoint: StoredObject | None,
        found: Sequence[StoredObject],
        lookup: Lookup | None,
        *,
        workspace: str = DEFAULT_WORKSPACE,
    ) -> dict[Column, ImputedValue]:
        """Return what features without a value get on the versions `found`; a lookup that stays keeps what it has.

        It reads training sets, which takes too long for the transaction that stores the routes.
        """
        with self.gate.database.read() as tx:
            before = None if endpoint is None else store.endpoint_record(tx, endpoint).lookup
            used = lookup or before
            if used is None or not has_imputation(used):
                return {}
            if lookup is not None:
                used, _ = validation.resolve_lookup(
                    self.gate, call, tx, lookup, workspace=workspace, opened=self._views
                )
            for each in found:
                self.gate.require(call, "models.read", each, tx=tx)
            plan = self._version_lookups.plan(call, tx, used, [self._versions(tx, each) for each in found])
        known = known_values(before) if lookup is None else {}
        unknown = {column: places for column, places in plan.items() if column not in known}
        return known | self._version_lookups.read(unknown)

    @operation("endpoints.configure", resource="endpoint")
    def configure(
        self,
        endpoint: EndpointRef,
        *,
        max_batch_rows: RowCount | None = None,
        batch_delay_ms: DelayMs | None = None,
        max_queue_ms: QueueMs | None = None,
        instances: RunCount | None = None,
        threads: RunCount | None = None,
        timeout_ms: TimeoutMs | None = None,
        engine: EngineName | None = None,
        device: Device | None = None,
        compiled: bool | None = None,
        requests_per_second: RequestRate | None = None,
        burst: BurstSize | None = None,
    ) -> DeployedEndpoint:
        """Set how the versions of an endpoint run; they are loaded again and no request fails meanwhile.

        What is not given is found by measurement again: the settings replace the earlier ones. A request is refused if
        it would wait for longer than max_queue_ms, a run is stopped after timeout_ms, and each caller may send
        requests_per_second, or `burst` at once. Versions run on a GPU if there is one and `device` is not cpu;
        with `compiled`, torch compiles the programs of .pt2 files. `engine` is openvino for ONNX files, or triton for
        the server that `serving.triton` names.
        """
        call = current_call()
        target = call.object("endpoint")
        if burst is not None and requests_per_second is None:
            raise InvalidInput.at("burst", given=burst, allowed="beside requests_per_second only")
        given = ServingSettings(
            max_batch_rows=max_batch_rows,
            batch_delay_ms=batch_delay_ms,
            max_queue_ms=max_queue_ms,
            instances=instances,
            threads=threads,
            timeout_ms=timeout_ms,
            engine=engine,
            device=device,
            compiled=compiled,
            requests_per_second=requests_per_second,
            burst=burst,
        )
        call.event_data |= {"settings": given.model_dump(exclude_none=True)}
        store.set_settings(call.tx, target.id, given)
        return self._record(call, target.id)

    @operation("endpoints.protect", resource="endpoint", allow=Role.ADMIN)
    def protect(
        self, endpoint: EndpointRef, *, alias: AliasName = "champion", independent: bool = False
    ) -> DeployedEndpoint:
        """Protect an endpoint: from now on it serves only versions that someone else has approved for an alias.

        independent: count only approvals of those whom the author did not appoint, directly or through others.
        """
        call = current_call()
        target = call.object("endpoint")
        found = [objects.by_id(call.tx, route.id) for route in store.endpoint_record(call.tx, target).routes]
        versions = [self._versions(call.tx, each) for each in found if each is not None]
        self._protection.protect(call, target, alias, versions, independent=independent)
        return self._record(call, target.id)

    @operation("endpoints.unprotect", resource="endpoint", allow=Role.APPROVER, confirm=True)
    def unprotect(self, endpoint: EndpointRef) -> DeployedEndpoint:
        """Release an endpoint: it serves any version again. Undo: endpoints.protect."""
        call = current_call()
        target = call.object("endpoint")
        self._protection.release(call, target)
        return self._record(call, target.id)

    @operation("endpoints.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[DeployedEndpoint]:
        """List the endpoints of a workspace."""
        call = current_call()
        return list_page(
            self.gate,
            ["endpoint"],
            lambda page: [self._record(call, found.id) for found in page],
            after=after,
            limit=limit,
            workspace=call.object("workspace").id,
        )

    @operation("endpoints.show", resource="endpoint", mode=Mode.READ)
    def show(self, endpoint: EndpointRef) -> DeployedEndpoint:
        """Show the URL and the routes of an endpoint, and why versions of it cannot be served."""
        call = current_call()
        return self._record(call, call.object("endpoint").id)

    @operation("endpoints.remove", resource="endpoint", confirm=True)
    def remove(self, endpoint: EndpointRef) -> DeployedEndpoint:
        """Remove an endpoint; its logged predictions stay. A protected one is removed by an administrator."""
        call = current_call()
        removed = self._record(call, call.object("endpoint").id)
        if removed.protected is not None:
            self._require_governor(call, call.object("endpoint"), "remove it")
        self._protection.bind(call, call.object("endpoint"), [route.id for route in removed.routes])
        objects.delete(call.tx, removed.id, at=call.now)
        store.advance(call.tx)
        return removed

    @operation("endpoints.replicas", resource="platform", mode=Mode.READ, allow=Role.OPERATOR)
    def replicas(self) -> ServerReplicas:
        """Show the replicas of the model server, which serve all endpoints, with their load in the last seconds."""
        return self._server.replicas()

    @operation("endpoints.restart", resource="platform", allow=Role.OPERATOR)
    def restart(self) -> ServerReplicas:
        """Replace the replicas of the model server one after the other; no request fails."""
        self._server.restart()
        return self._server.replicas()

    @operation("endpoints.stats", resource="endpoint", mode=Mode.READ)
    def stats(
        self, endpoint: EndpointRef, *, since: AwareDatetime | None = None, until: AwareDatetime | None = None
    ) -> EndpointStats:
        """Show requests, errors, latency and scores of each version; the model server reports every few seconds.

        Requests are counted by the minute in which they came, and labels by the time of the prediction.
        """
        call = current_call()
        if since is not None and until is not None and until <= since:
            raise InvalidInput.at("until", given=until, allowed=f"later than {since.isoformat()}")
        record = store.endpoint_record(call.tx, call.object("endpoint"))
        versions = store.stats(call.tx, record.id, since=since, until=until)
        return EndpointStats(endpoint=record.name, since=since, scoring=record.scoring, versions=versions)

    @operation("endpoints.load", resource="workspace", mode=Mode.READ)
    def load(self, *, workspace: WorkspaceRef | None = None) -> ServerLoad:
        """Show what the model server does now for the endpoints of a workspace, in counts that grow.

        `falaj endpoints top` shows the rates between two of them.
        """
        call = current_call()
        found: Page[DeployedEndpoint] = list_page(
            self.gate,
            ["endpoint"],
            lambda page: [self._record(call, each.id) for each in page],
            after="",
            limit=LOADED_ENDPOINTS,
            workspace=call.object("workspace").id,
        )
        names = {each.id: each.name for each in found.items}
        now = self._server.load()
        versions = [
            each.model_copy(update={"name": names[each.endpoint]})
            for each in now.versions
            if each.endpoint in names
        ]
        return now.model_copy(update={"versions": tuple(versions)})

    @operation("endpoints.shadow_report", resource="endpoint", mode=Mode.READ)
    def shadow_report(self, endpoint: EndpointRef) -> ShadowReport:
        """Show how the answers of an endpoint's shadows differ from those that were sent, since the routes changed."""
        call = current_call()
        record = store.endpoint_record(call.tx, call.object("endpoint"))
        return ShadowReport(
            endpoint=record.name,
            shadows=tuple(route for route in record.routes if route.shadow),
            differences=store.shadow_differences(call.tx, record.id),
        )

    @operation("endpoints.observations", resource="endpoint", mode=Mode.READ)
    def observations(
        self, endpoint: EndpointRef, *, after: ObservationNumber = 0, limit: PageSize = 100
    ) -> EndpointObservations:
        """List requests and scores of versions that answer side by side, in the order in which they were stored.

        They are kept from the change of the routes that divides the requests to the next change.
        """
        call = current_call()
        record = store.endpoint_record(call.tx, call.object("endpoint"))
        found = store.observations_after(call.tx, record.id, after, limit=limit)
        following = found[-1].number if len(found) == limit else None
        return EndpointObservations(
            endpoint=record.name,
            since=record.changed_at,
            scoring=record.scoring,
            items=tuple(found),
            next=following,
        )

    @operation("endpoints.infer", resource="endpoint", mode=Mode.HOT)
    def infer(
        self,
        endpoint: EndpointRef,
        *,
        inputs: Inputs,
        request: RequestId = "",
        version: Name | None = None,
    ) -> InferenceResult:
        """Request predictions from an endpoint. For high throughput, send requests to its URL with the same token."""
        call = current_call()  # the gate resolved `endpoint` to the hot id
        return request_inference(
            self._server, str(call.hot_id), call.caller.name, inputs=inputs, request=request, version=version
        )

    @operation("endpoints.feedback", resource="endpoint", mode=Mode.LATE)
    def feedback(self, endpoint: EndpointRef, *, predictions: Outcomes) -> FeedbackResult:
        """Submit the ground truth of predictions; it is joined with the predictions and scored by version."""
        call = current_call()
        return score_labels(self.gate, call, self._prediction_log, call.object("endpoint"), predictions)

    @operation("endpoints.prediction", resource="predictions", mode=Mode.FREE, exports=True)
    def prediction(self, prediction: PredictionRef) -> PredictionRecord:
        """Show one logged prediction: its caller, version, inputs and outputs."""
        return self._prediction_log.prediction(current_call().object("prediction"), prediction)

    @operation("endpoints.record", resource="endpoint", mode=Mode.LATE, allow=Role.OPERATOR, internal=True)
    def record(
        self,
        data: ByteStream,
        *,
        endpoint: EndpointRef,
        batch: BatchName,
        rows: Count,
        version: ModelVersionRef,
        views: tuple[ViewRef, ...] = (),
    ) -> PredictionBatch:
        """Store a batch of predictions. Only the model server may do so.

        The batch inherits the restrictions of its endpoint, `version` and `views`.
        """
        call = current_call()
        _require_server(call)
        served = call.object("endpoint"), call.object("version")  # `views` are sources of the call as well
        return self._prediction_log.add(call, data, *served, ident=ObjectId(batch), rows=rows)

    @operation("endpoints.announce", resource="platform", mode=Mode.LATE, allow=Role.OPERATOR, internal=True)
    def announce(self) -> AnnouncedPredictions:
        """Tell of the predictions since the last time, as one event for each endpoint and version.

        The controller calls this. If there were none, this is a single query and is not audited.
        """
        call = current_call()
        with self.gate.database.read() as tx:
            if not store.has_unannounced(tx):
                return AnnouncedPredictions()
        return self.gate.commit(call, lambda: announce_predictions(call))

    @operation("endpoints.report", resource="endpoint", allow=Role.OPERATOR, internal=True)
    def report(
        self,
        endpoint: EndpointRef,
        *,
        counts: tuple[VersionCounts, ...] = (),
        problems: tuple[LoadProblem, ...] = (),
        shadows: tuple[ShadowCounts, ...] = (),
        measured: tuple[MeasuredVersion, ...] = (),
    ) -> ReportReceipt:
        """Add counts, load problems, shadows and measurements of an endpoint's versions. Only the model server may."""
        call = current_call()
        _require_server(call)
        target = call.object("endpoint")
        if store.endpoint_row(call.tx, target.id) is None:
            raise Conflict(f"endpoint {target.name} was removed")
        store.add_counts(call.tx, target.id, counts, now=call.now)
        store.set_problems(call.tx, target.id, problems, now=call.now)
        store.add_shadows(call.tx, target.id, shadows)
        store.set_measurements(call.tx, target.id, measured)
        named = {each.version for each in counts} | {each.version for each in problems}
        named |= {each.version for each in shadows} | {each.version for each in measured}
        return ReportReceipt(versions=len(named))

    def _put(
        self,
        call: Call,
        target: StoredObject,
        routes: Sequence[ServedRoute],
        found: Sequence[StoredObject],
        *,
        lookup: Lookup | None,
        scoring: ScoringRule | None,
        before: DeployedEndpoint | None,
        values: Mapping[Column, ImputedValue],
        sticky: StickyKey | None = None,
    ) -> None:
        """Validate and store `routes`; lookup, scoring and sticky key stay as in `before` unless given."""
        zone = self.gate.zones.named(target.zone)
        versions = validation.require_servable(self.gate, call, found, zone, opened=self._versions)
        parts = [step for version in versions for step in self._steps(call.tx, version.id)]
        self._server.require_engine({version.format for version in (*versions, *parts)})
        self._protection.require(call, target, versions, routes=routes, before=before)
        flowing = [] if before is None else [*found]  # a new endpoint has edges from its inputs already
        if lookup is not None:
            workspace = objects.by_id(call.tx, target.workspace)
            lookup, views = validation.resolve_lookup(
                self.gate,
                call,
                call.tx,
                lookup,
                workspace=workspace.name if workspace else DEFAULT_WORKSPACE,
                opened=self._views,
            )
            seen = partial(self.gate.authorizer.sees, call.tx, call.caller)
            self.gate.zones.require(call.tx, views, zone, seen=seen)
            self._require_lookup_may_change(call, target, lookup, before)
            flowing += views
        elif before is not None:
            lookup = before.lookup
        if lookup is not None:
            lookup = self._version_lookups.resolve(call, lookup, versions, values)
        validation.require_lookup_fits(lookup, versions)
        model = versions[0].name
        scoring = scoring or (before.scoring if before is not None and before.model == model else None)
        sticky = sticky or (None if before is None else before.sticky)
        store.put_endpoint(
            call, target.id, model=model, routes=routes, lookup=lookup, sticky=sticky, scoring=scoring
        )
        if flowing:
            graph.flow(call, flowing, target)
        labelled = objects.by_id(call.tx, target.id) or target
        self._protection.require_by_policy(call, labelled, versions, routes=routes, before=before)

    def _steps(self, tx: Transaction, version: ObjectId) -> Sequence[ModelVersion]:
        """Return the versions that an ensemble consists of; none of any other version, or of one that was deleted."""
        found = objects.by_id(tx, version)
        parts = [] if found is None else validation.ensemble_parts(tx, self._versions(tx, found))
        return [self._versions(tx, part) for part in parts if part.kind == "model_version"]

    def _require_lookup_may_change(
        self, call: Call, target: StoredObject, lookup: Lookup, before: DeployedEndpoint | None
    ) -> None:
        """Raise Denied if the endpoint is protected and would get other inputs: they decide on its answers, too."""
        if before is None or validation.is_same_lookup(lookup, before.lookup):
            return
        served = self._protection.with_steps(call.tx, [route.id for route in before.routes])
        if self._protection.alias_of(call, target, served) is not None:
            self._require_governor(call, target, "change its lookup")

    def _require_governor(self, call: Call, target: StoredObject, doing: str) -> None:
        """Raise Denied unless the caller may protect or release the endpoint."""
        actions = "endpoints.protect", "endpoints.unprotect"
        if not any(self.gate.visible([target], action=action) for action in actions):
            raise Denied(
                f"endpoint {target.name} is protected: an administrator of its workspace can {doing}",
                details={"rule": "serving.protected", "needs": "admin"},
            )

    def _record(self, call: Call, ident: str) -> DeployedEndpoint:
        found = objects.by_id(call.tx, ident)
        if found is None:
            raise objects.unknown(ident, "endpoint")
        workspace = objects.by_id(call.tx, found.workspace)
        address = self._server.url()
        called = endpoint_path(workspace, found.name)
        path = None if address is None else f"{address}/v2/models/{called}"
        grpc = self._server.grpc_address()
        record = store.endpoint_record(call.tx, found, url=path)
        alias = self._protection.alias_of(call, found, [route.id for route in record.routes])
        problem = None if address else self._server.problem()
        more = {"protected": alias, "problem": problem, "grpc": None if grpc is None else f"{grpc} {called}"}
        return record.model_copy(update=more)


def endpoint_path(workspace: StoredObject | None, name: str) -> str:
    """Return the name of an endpoint in the model server's paths: `name`, or `workspace/name`."""
    if workspace is None or workspace.name == DEFAULT_WORKSPACE:
        return name
    return f"{workspace.name}/{name}"


def _require_server(call: Call) -> None:
    if (call.caller.kind, call.caller.name) != ("service", MODEL_SERVER):
        raise Denied(f"only the service {MODEL_SERVER} may {call.operation.name}")
