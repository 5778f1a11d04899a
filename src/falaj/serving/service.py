"""The room: endpoints, where their requests go, what they answered, and how good the answers were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AwareDatetime, Field

from falaj.errors import Conflict, Denied
from falaj.governance import objects
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.lineage import graph
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ByteStream, Mode, operation
from falaj.governance.operations.pagination import list_workspace_page
from falaj.records.features import ViewRef
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import DEFAULT_WORKSPACE, Name, ObjectId, WorkspaceRef, ZoneName
from falaj.records.registry import ModelVersionRef
from falaj.records.serving import (
    DeployedEndpoint,
    EndpointRef,
    EndpointStats,
    FeedbackResult,
    GroundTruth,
    InferenceResult,
    InferInput,
    LoadProblem,
    Lookup,
    PredictionBatch,
    PredictionRecord,
    PredictionRef,
    ReportReceipt,
    Route,
    Routes,
    ScoringRule,
    ServedRoute,
    VersionCounts,
)
from falaj.serving import store, validation
from falaj.serving.dependencies import LoadVersion, LoadView, ModelServerClient
from falaj.serving.feedback import score_labels
from falaj.serving.inference_client import request_inference
from falaj.serving.prediction_log import PredictionLog

MODEL_SERVER = "model-server"
"""The service account that the model server acts as."""

Outcomes = Annotated[tuple[GroundTruth, ...], Field(min_length=1, max_length=10_000)]
Inputs = Annotated[tuple[InferInput, ...], Field(min_length=1, max_length=1000)]
RequestId = Annotated[str, Field(max_length=256)]
BatchName = Annotated[str, Field(pattern=r"^predictions_[0-9a-z]{26}$")]
Count = Annotated[int, Field(ge=1, le=10_000_000)]


class Endpoints:
    """Serve model versions under a name, and watch how they do."""

    def __init__(
        self,
        gate: Gate,
        *,
        stores: Mapping[str, EncryptedBlobs],
        versions: LoadVersion,
        views: LoadView,
        server: ModelServerClient,
    ) -> None:
        """The stores are by zone."""
        self.gate = gate
        self._prediction_log = PredictionLog(gate, stores)
        self._versions = versions
        self._views = views
        self._server = server

    @operation("endpoints.deploy", resource="workspace")
    def deploy(
        self,
        name: Name,
        *,
        model: ModelVersionRef,
        lookup: Lookup | None = None,
        scoring: ScoringRule | None = None,
        workspace: WorkspaceRef | None = None,
        zone: ZoneName | None = None,
    ) -> DeployedEndpoint:
        """Answer all requests for an endpoint with one model version; the endpoint is made on first use.

        `lookup` and `scoring` stay as they are unless given. Scoring is log loss or squared error; unless given, the
        first labels decide.
        """
        call = current_call()
        validation.require_name(name)
        self._server.require_engine()
        found = objects.by_name(call.tx, workspace=call.target.id, kind="endpoint", name=name)
        new = found is None
        target = found or call.create("endpoint", name, workspace=call.target, zone=call.zone)
        version = call.object("model")
        routes = validation.served_routes([Route(version=version.name)], [version])
        kept = None if new else store.endpoint_record(call.tx, target)
        self._put(call, target, routes, [version], lookup=lookup, scoring=scoring, before=kept)
        self._server.wake()
        return self._record(call, target.id)

    @operation("endpoints.route", resource="endpoint")
    def route(self, endpoint: EndpointRef, *, routes: Routes) -> DeployedEndpoint:
        """Divide the requests of an endpoint among versions of its model, by weight, from now on."""
        call = current_call()
        validation.require_routes(routes)
        before = store.endpoint_record(call.tx, call.target)
        beside = objects.by_id(call.tx, before.routes[0].id) or call.target
        found = validation.resolve_versions(call, routes, model=before.model, beside=beside)
        served = validation.served_routes(routes, found)
        self._put(call, call.target, served, found, lookup=None, scoring=None, before=before)
        return self._record(call, call.target.id)

    @operation("endpoints.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[DeployedEndpoint]:
        """The endpoints of a workspace."""
        call = current_call()
        return list_workspace_page(
            self.gate, "endpoint", lambda _tx, found: self._record(call, found.id), after=after, limit=limit
        )

    @operation("endpoints.show", resource="endpoint", mode=Mode.READ)
    def show(self, endpoint: EndpointRef) -> DeployedEndpoint:
        """Where an endpoint answers, where its requests go, and which of its versions cannot be served, and why."""
        return self._record(current_call(), current_call().target.id)

    @operation("endpoints.remove", resource="endpoint", confirm=True)
    def remove(self, endpoint: EndpointRef) -> DeployedEndpoint:
        """Answer no more for an endpoint; its predictions stay."""
        call = current_call()
        gone = self._record(call, call.target.id)
        objects.delete(call.tx, call.target.id, at=call.now)
        store.advance(call.tx)
        return gone

    @operation("endpoints.stats", resource="endpoint", mode=Mode.READ)
    def stats(self, endpoint: EndpointRef, *, since: AwareDatetime | None = None) -> EndpointStats:
        """Requests, errors, latency and scores of each version; the model server reports every few seconds."""
        call = current_call()
        record = store.endpoint_record(call.tx, call.target)
        versions = store.stats(call.tx, call.target.id, since=since)
        return EndpointStats(endpoint=record.name, since=since, scoring=record.scoring, versions=versions)

    @operation("endpoints.infer", resource="endpoint", mode=Mode.HOT)
    def infer(
        self,
        endpoint: EndpointRef,
        *,
        inputs: Inputs,
        request: RequestId = "",
        version: Name | None = None,
    ) -> InferenceResult:
        """Ask an endpoint for predictions. Small requests; programs in a hurry ask its URL, by the same rights."""
        call = current_call()
        return request_inference(
            self._server, str(call.hot_id), call.caller.name, inputs=inputs, request=request, version=version
        )

    @operation("endpoints.feedback", resource="endpoint", mode=Mode.LATE)
    def feedback(self, endpoint: EndpointRef, *, predictions: Outcomes) -> FeedbackResult:
        """Say what came true for predictions; it is joined with what was predicted, and scored by version."""
        call = current_call()
        return score_labels(self.gate, call, self._prediction_log, predictions)

    @operation("endpoints.prediction", resource="predictions", mode=Mode.FREE)
    def prediction(self, prediction: PredictionRef) -> PredictionRecord:
        """One logged prediction: who asked which version, what went in and what came out."""
        return self._prediction_log.prediction(current_call().target, prediction)

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
        """Store a batch of predictions. Only the model server does that."""
        call = current_call()
        _require_server(call)
        return self._prediction_log.add(call, data, ident=ObjectId(batch), rows=rows)

    @operation("endpoints.report", resource="endpoint", allow=Role.OPERATOR, internal=True)
    def report(
        self,
        endpoint: EndpointRef,
        *,
        counts: tuple[VersionCounts, ...] = (),
        problems: tuple[LoadProblem, ...] = (),
    ) -> ReportReceipt:
        """Add to what is known of an endpoint's versions. Only the model server does that."""
        call = current_call()
        _require_server(call)
        store.add_counts(call.tx, call.target.id, counts, now=call.now)
        store.set_problems(call.tx, call.target.id, problems, now=call.now)
        named = {each.version for each in counts} | {each.version for each in problems}
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
    ) -> None:
        """Serve `routes` from now on, if that may be; lookup and scoring stay as `before` unless given."""
        zone = self.gate.zones.named(target.zone)
        versions = validation.require_servable(self.gate, call, found, zone, opened=self._versions)
        flowing = [] if before is None else [*found]  # what makes a new endpoint flows into it anyway
        if lookup is not None:
            home = objects.by_id(call.tx, target.workspace)
            lookup, views = validation.resolve_lookup(
                self.gate,
                call,
                lookup,
                workspace=home.name if home else DEFAULT_WORKSPACE,
                opened=self._views,
            )
            self.gate.zones.require(call.tx, views, zone, seen=lambda _found: True)
            flowing += views
        elif before is not None:
            lookup = before.lookup
        validation.require_lookup_fits(lookup, versions)
        model = versions[0].name
        scoring = scoring or (before.scoring if before is not None and before.model == model else None)
        store.put_endpoint(call, target.id, model=model, routes=routes, lookup=lookup, scoring=scoring)
        if flowing:
            graph.flow(call, flowing, target)

    def _record(self, call: Call, ident: str) -> DeployedEndpoint:
        found = objects.by_id(call.tx, ident)
        if found is None:
            raise objects.unknown(ident, "endpoint")
        home = objects.by_id(call.tx, found.workspace)
        address = self._server.url()
        path = None if address is None else f"{address}/v2/models/{endpoint_path(home, found.name)}"
        return store.endpoint_record(call.tx, found, url=path)


def endpoint_path(home: StoredObject | None, name: str) -> str:
    """What an endpoint is called in the model server's paths: `name`, or `workspace/name`."""
    return name if home is None or home.name == DEFAULT_WORKSPACE else f"{home.name}/{name}"


def _require_server(call: Call) -> None:
    if (call.caller.kind, call.caller.name) != ("service", MODEL_SERVER):
        raise Denied(f"only the service {MODEL_SERVER} may {call.operation.name}")
    if call.operation.mode is Mode.WRITE and store.endpoint_row(call.tx, call.target.id) is None:
        raise Conflict(f"endpoint {call.target.name} is gone")
