"""The operations of serving: endpoints, their routes, logged predictions and feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Annotated, Any

from pydantic import AwareDatetime, Field
from pydantic_core import from_json, to_json

from falaj.errors import Conflict, Denied, InvalidInput
from falaj.governance import objects
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.lineage import graph
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ByteStream, Mode, operation
from falaj.governance.operations.pagination import list_page
from falaj.ports.parsers import ParserPool
from falaj.records.control.replicas import ServerReplicas
from falaj.records.features import ViewRef
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import DEFAULT_WORKSPACE, Name, ObjectId, WorkspaceRef, ZoneName
from falaj.records.optimization import VariantChoice
from falaj.records.registry import AliasName, ModelVersionRef
from falaj.records.serving import (
    BurstSize,
    DelayMs,
    DeployedEndpoint,
    EndpointObservations,
    EndpointRef,
    EndpointStats,
    FeedbackResult,
    GroundTruth,
    InferenceResult,
    InferInput,
    InferOutput,
    LoadProblem,
    Lookup,
    MeasuredVersion,
    PredictionBatch,
    PredictionRecord,
    PredictionRef,
    QueueMs,
    ReportReceipt,
    RequestRate,
    Route,
    Routes,
    RowCount,
    RunCount,
    ScoringRule,
    ServedRoute,
    ServerLoad,
    ServingSettings,
    ShadowCounts,
    ShadowReport,
    StickyKey,
    TimeoutMs,
    VersionCounts,
)
from falaj.serving import store, validation
from falaj.serving.dependencies import (
    ChooseVariant,
    LoadVersion,
    LoadView,
    ModelServerClient,
    VersionApprovals,
)
from falaj.serving.feedback import score_labels
from falaj.serving.prediction_log import PredictionLog
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
        variants: ChooseVariant,
        server: ModelServerClient,
        parsers: ParserPool,
    ) -> None:
        """`stores` are keyed by zone."""
        self.gate = gate
        self._prediction_log = PredictionLog(gate, stores, parsers)
        self._versions = versions
        self._protection = EndpointProtection(approvals)
        self._views = views
        self._variants = variants
        self._server = server

    @operation("endpoints.deploy", resource="workspace")
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
        `lookup` and `scoring` stay unchanged unless given. Scoring is log loss or squared error; by default the first
        labels decide. A protected endpoint serves only versions that were approved for its alias; a policy may demand
        approvals too (`endpoints.serve`).
        """
        call = current_call()
        validation.require_name(name)
        self._server.require_engine()
        owner = call.object("workspace")
        found = self.gate.named(call, "endpoint", name, workspace=owner)
        new = found is None
        zone_name = self.gate.zones.named(zone).name
        target = found or call.create("endpoint", name, workspace=owner, zone=zone_name)
        named = call.object("model")
        self.gate.require(call, "models.read", named)
        version = self._variants(call.tx, named, variant)
        call.event_data |= {"endpoint": name, "version": version.name}
        routes = validation.served_routes([Route(version=version.name)], [version])
        kept = None if new else store.endpoint_record(call.tx, target)
        self._put(call, target, routes, [version], lookup=lookup, scoring=scoring, before=kept)
        if version.id != named.id:
            graph.flow(call, [version], target)
        self._server.wake()
        return self._record(call, target.id)

    @operation("endpoints.route", resource="endpoint")
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
        target = call.object("endpoint")
        validation.require_routes(routes)
        before = store.endpoint_record(call.tx, target)
        served_now = objects.by_id(call.tx, before.routes[0].id) or target
        found = validation.resolve_versions(call, routes, model=before.model, served=served_now)
        served = validation.served_routes(routes, found)
        self._put(call, target, served, found, lookup=None, scoring=None, before=before, sticky=sticky)
        return self._record(call, target.id)

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
        requests_per_second: RequestRate | None = None,
        burst: BurstSize | None = None,
    ) -> DeployedEndpoint:
        """Set how the versions of an endpoint run; they are loaded again and no request fails meanwhile.

        What is not given is found by measurement again: the settings replace the earlier ones. A request is refused if
        it would wait for longer than max_queue_ms, a run is stopped after timeout_ms, and each caller may send
        requests_per_second, or `burst` at once.
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
    def stats(self, endpoint: EndpointRef, *, since: AwareDatetime | None = None) -> EndpointStats:
        """Show requests, errors, latency and scores of each version; the model server reports every few seconds."""
        call = current_call()
        record = store.endpoint_record(call.tx, call.object("endpoint"))
        versions = store.stats(call.tx, record.id, since=since)
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
        return _request_inference(
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
        sticky: StickyKey | None = None,
    ) -> None:
        """Validate and store `routes`; lookup, scoring and sticky key stay as in `before` unless given."""
        zone = self.gate.zones.named(target.zone)
        versions = validation.require_servable(self.gate, call, found, zone, opened=self._versions)
        self._protection.require(call, target, versions, routes=routes, before=before)
        flowing = [] if before is None else [*found]  # a new endpoint has edges from its inputs already
        if lookup is not None:
            workspace = objects.by_id(call.tx, target.workspace)
            lookup, views = validation.resolve_lookup(
                self.gate,
                call,
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

    def _require_lookup_may_change(
        self, call: Call, target: StoredObject, lookup: Lookup, before: DeployedEndpoint | None
    ) -> None:
        """Raise Denied if the endpoint is protected and would get other inputs: they decide on its answers, too."""
        if before is None or validation.is_same_lookup(lookup, before.lookup):
            return
        served = [route.id for route in before.routes]
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


def _request_inference(
    server: ModelServerClient,
    endpoint: str,
    caller: str,
    *,
    inputs: Sequence[InferInput],
    request: str,
    version: str | None,
) -> InferenceResult:
    """Send an inference request to the model server through its internal socket."""
    path = endpoint if version is None else f"{endpoint}/versions/{version}"
    body = to_json({"id": request, "inputs": [each.model_dump(mode="json") for each in inputs]})
    response = from_json(server.infer(f"/v2/models/{path}/infer", caller, body))
    parameters = response.get("parameters", {})
    return InferenceResult(
        model_name=response["model_name"],
        model_version=response["model_version"],
        id=response.get("id", ""),
        prediction=parameters.get("prediction") or response.get("id"),
        outputs=tuple(_output(**each) for each in response["outputs"]),
        missing=from_json(parameters.get("missing_features", "[]")),
        missing_rows=parameters.get("missing_rows", 0),
        feature_age_s=parameters.get("feature_age_s"),
        fallback_from=parameters.get("fallback_from"),
        fallback_reason=parameters.get("fallback_reason"),
    )


def _output(*, data: list[Any], parameters: object = None, **fields: Any) -> InferOutput:
    """Return an output tensor; what is not finite becomes null, which is all that strict JSON has for it."""
    shown = [None if isinstance(value, float) and not isfinite(value) else value for value in data]
    return InferOutput(**fields, data=shown, not_finite=shown.count(None))
