"""Build the services: each gets the gate, its drivers and the dependencies that it declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from falaj import scheduling
from falaj.assembly import drivers
from falaj.assembly.compute import LocalCompute
from falaj.assembly.deferred import Deferred, deferred
from falaj.assembly.home import Home
from falaj.assembly.model_server import LocalModelServer
from falaj.assembly.parsing import open_budget
from falaj.control.clusters import Clusters
from falaj.control.nodes import Nodes
from falaj.control.pipelines import service as pipeline_service
from falaj.control.pipelines.service import Pipelines
from falaj.control.scale_up import ScaleUp
from falaj.control.service import PlatformService
from falaj.control.services import Services, all_operations
from falaj.control.workflows.service import IntentQueue, Workflows
from falaj.features import store as feature_store
from falaj.features import training_sets
from falaj.features.request_time.typical_values import TrainingStatistics
from falaj.features.service import Features
from falaj.features.table_versions import files as table_files
from falaj.features.table_versions.published import version_in_use
from falaj.governance import objects
from falaj.governance.audit.deep import AuditedStores, TableDigests
from falaj.governance.audit.service import Audit
from falaj.governance.blobs.contents import BlobContents
from falaj.governance.blobs.service import Blobs
from falaj.governance.catalog.service import Objects
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.encryption.keyring import Keyring
from falaj.governance.encryption.service import Keys
from falaj.governance.encryption.values import SealedValues
from falaj.governance.events import store as event_store
from falaj.governance.events.feed import MarkReaders
from falaj.governance.events.service import Events, Webhooks
from falaj.governance.identity.service import Groups, Tokens, Users, Workspaces
from falaj.governance.lineage.service import Lineage
from falaj.governance.operations.gate import Gate
from falaj.governance.policy.service import Policies
from falaj.governance.residency.service import Zones
from falaj.governance.secrets.service import Secrets
from falaj.monitoring import store as monitor_store
from falaj.monitoring.alerts import find_drift
from falaj.monitoring.service import Monitoring
from falaj.optimization.hardware import instruction_set
from falaj.optimization.service import VIEW_COLUMN, DatasetColumns, Optimizations
from falaj.optimization.serving_variants import choose_variant
from falaj.ports.cluster.maintenance import NodeMaintenance
from falaj.ports.keys import KeyService
from falaj.ports.metadata import Database, Transaction
from falaj.ports.parsers import ParserPool
from falaj.ports.tables import TableKey, TableStore
from falaj.records.config import Config, KubernetesConfig
from falaj.records.control.predictions import PredictionRun
from falaj.records.governance.objects import StoredObject
from falaj.records.models.gates import CheckFinding
from falaj.records.registry import ModelVersion
from falaj.registry.aliases import ServingApprovals
from falaj.registry.dependencies import GateCheck
from falaj.registry.service import Models
from falaj.registry.version_descriptions import ModelVersions
from falaj.scheduling.accounting.accounts import QueueAccounts
from falaj.scheduling.kueue.sync import KueueCluster
from falaj.scheduling.service import Queues, Usage
from falaj.serving import store as endpoint_store
from falaj.serving.batch_predictions.service import Predictions, evaluation_run, require_batchable
from falaj.serving.lookups.steps import StepLookups
from falaj.serving.prediction_log import PREDICTED
from falaj.serving.service import Endpoints
from falaj.serving.validation import ensemble_parts
from falaj.tracking import store as run_store
from falaj.tracking.artifacts import LoggedArtifacts
from falaj.tracking.experiments import Experiments
from falaj.tracking.job_runs import JobRuns
from falaj.tracking.logged_models import LoggedModels
from falaj.tracking.service import Runs
from falaj.tracking.uploads import Uploads
from falaj.training import store as job_store
from falaj.training.queue import QueueReader
from falaj.training.service import Jobs
from falaj.tuning.service import Studies


@dataclass(frozen=True, kw_only=True)
class ServiceContext:
    """What the services are built from."""

    home: Home
    config: Config
    gate: Gate
    keyring: Keyring
    keys: KeyService
    intents: IntentQueue
    compute: LocalCompute
    parsers: ParserPool


def build_services(context: ServiceContext) -> tuple[Services, Callable[[], None]]:
    """Return every service, and the function that closes their drivers."""
    gate, held = context.gate, ExitStack()
    stores = _stores(context)
    tables = {
        zone: deferred(partial(drivers.open_tables, context.home, context.config, zone)) for zone in stores
    }
    features = _features(context, stores, tables, held)
    contents = BlobContents(gate.database, stores, platform=gate.audit.log_id)
    training = TrainingStatistics(features.backends)
    models = _models(context, contents, training)
    accounts = _accounts(context)
    services = Services(
        workspaces=Workspaces(gate, context.keyring),
        users=Users(gate),
        groups=Groups(gate),
        tokens=Tokens(gate),
        policies=Policies(gate, all_operations(), context.parsers),
        objects=Objects(gate),
        zones=Zones(gate),
        keys=Keys(gate, context.keyring),
        secrets=Secrets(gate, SealedValues(context.keyring, "secrets")),
        events=Events(gate, marks=change_marks()),
        webhooks=_webhooks(context),
        blobs=Blobs(gate, stores, context.intents, platform=gate.audit.log_id),
        lineage=Lineage(gate),
        audit=_audit(context, stores, tables),
        workflows=Workflows(gate),
        platform=PlatformService(gate, context.keys, context.compute),
        experiments=Experiments(gate),
        runs=Runs(gate, contents, parsers=context.parsers, kept=context.config.tracking.keep_deleted),
        loggedmodels=LoggedModels(gate, contents),
        uploads=Uploads(gate, contents),
        nodes=_nodes(context, accounts, held),
        clusters=_clusters(context, held),
        jobs=_jobs(context, contents, accounts),
        queues=_queues(context, accounts, held),
        usage=Usage(gate, accounts=accounts, jobs=job_store),
        features=features,
        models=models,
        modelversions=ModelVersions(gate, models.open_version),
        endpoints=_endpoints(context, models, stores, training),
        monitoring=Monitoring(
            gate,
            training_set=partial(training_sets.stream, features.backends),
            sealed=SealedValues(context.keyring, "monitoring"),
        ),
        optimization=_optimizations(context, models),
        studies=Studies(gate, BlobContents(gate.database, stores), context.intents),
        predictions=Predictions(gate, context.intents, version=models.open_version),
        pipelines=Pipelines(gate, BlobContents(gate.database, stores), context.intents),
    )
    return services, held.close


def change_marks() -> MarkReaders:
    """Return how changes that make no event are recognized, by kind of object."""
    return {
        "run": run_store.change_marks,
        "job": job_store.change_marks,
        "monitor": monitor_store.change_marks,
        "endpoint": endpoint_store.change_marks,
        "pipeline": pipeline_service.change_marks,
        "webhook": event_store.change_marks,
    }


def _audit(
    context: ServiceContext,
    stores: Mapping[str, EncryptedBlobs],
    tables: Mapping[str, TableStore],
) -> Audit:
    audited = AuditedStores(
        lambda zone, workspace, key: stores[zone].read(workspace, key),
        table_digests(context.gate.database, tables),
    )
    return Audit(context.gate, context.gate.audit, context.keys, stores=audited)


def _optimizations(context: ServiceContext, models: Models) -> Optimizations:
    return Optimizations(
        context.gate,
        context.intents,
        version=models.open_version,
        columns=dataset_columns,
        prices=context.config.prices,
    )


def dataset_columns(tx: Transaction, found: StoredObject) -> DatasetColumns:
    """Return the columns of a training set, and which are the keys of its views and its event time."""
    made = feature_store.load_training_set(tx, found)
    stored = ((objects.by_id(tx, pinned.view), pinned.version) for pinned in made.views)
    views = [
        feature_store.find_view(tx, view, version=version) for view, version in stored if view is not None
    ]
    keys = {key.name for view in views if view is not None for key in view.keys}
    return DatasetColumns(made.columns, frozenset({made.event_time, *keys}))


def _nodes(context: ServiceContext, accounts: QueueAccounts, held: ExitStack) -> Nodes:
    cluster = context.config.kubernetes
    scale_up = ScaleUp(
        context.gate,
        QueueReader(accounts),
        context.compute.machines,
        context.compute.placeholders(),
        limit=0 if cluster is None else cluster.scale_up,
    )
    return Nodes(
        context.gate,
        context.compute,
        queue=QueueReader(accounts),
        mig=deferred(drivers.open_mig_tool),
        scale_up=scale_up,
        maintenance=_maintenance(context, held),
    )


def _webhooks(context: ServiceContext) -> Webhooks:
    return Webhooks(
        context.gate,
        SealedValues(context.keyring, "webhooks"),
        deferred(partial(drivers.open_egress, context.config)),
        types=event_types(),
    )


def event_types() -> frozenset[str]:
    """Return the events that there are, by the names of their operations; alerts and predictions have none."""
    emitting = (name for name, each in all_operations().items() if each.emits and not each.mode.reads)
    return frozenset({*emitting, "monitoring.alert", PREDICTED})


def _stores(context: ServiceContext) -> dict[str, EncryptedBlobs]:
    return {
        name: EncryptedBlobs(drivers.open_blobs(context.home, name, zone), context.keyring)
        for name, zone in context.config.zones.items()
    }


def table_digests(database: Database, tables: Mapping[str, TableStore]) -> TableDigests:
    """Return the digests of the files that readers of table versions get, from their bytes as they are now."""

    def digests(zone: str, table: TableKey, versions: Sequence[int]) -> dict[int, str]:
        with database.read() as tx:
            in_use = version_in_use(tx, table, versions[-1])
            recorded = table_files.digests_of_versions(tx, table, versions)
        tables[zone].check(table, version=in_use)  # what was merged, and is not in use, may have been removed
        return recorded

    return digests


def _endpoints(
    context: ServiceContext, models: Models, stores: dict[str, EncryptedBlobs], training: TrainingStatistics
) -> Endpoints:
    return Endpoints(
        context.gate,
        stores=stores,
        versions=models.open_version,
        approvals=ServingApprovals(context.gate),
        views=feature_store.find_view,
        training=training,
        variants=partial(choose_variant, extensions=instruction_set()),
        server=LocalModelServer(context.home),
        parsers=context.parsers,
    )


def gate_checks() -> dict[str, GateCheck]:
    """Return the checks that services offer for the gates of aliases, by the names under which gates list them."""
    return {"no-drift-alert": _no_drift_alert}


def _no_drift_alert(tx: Transaction, version: ModelVersion) -> CheckFinding:
    return find_drift(tx, version, endpoint_store.endpoints_of(tx, version))


class BatchEvaluations:
    """Evaluates model versions by batch prediction. `models` is set once the registry is there, which needs this."""

    models: Models

    def columns(self, tx: Transaction, data: StoredObject) -> tuple[tuple[str, ...], frozenset[str]]:
        found = dataset_columns(tx, data)
        of_views = {name for name in found.columns if VIEW_COLUMN in name}
        return found.columns, found.identifying | of_views

    def plan(self, tx: Transaction, version: ModelVersion, target: str) -> PredictionRun:
        parts = ensemble_parts(tx, version)
        require_batchable(version, [part.name for part in parts if part.kind != "model_version"])
        steps = [self.models.open_version(tx, part) for part in parts]
        return evaluation_run(version, target, steps)


def _models(context: ServiceContext, contents: BlobContents, training: TrainingStatistics) -> Models:
    evaluations = BatchEvaluations()
    models = Models(
        context.gate,
        contents,
        context.keys,
        parsers=context.parsers,
        lookups=StepLookups(context.gate, views=feature_store.find_view, training=training),
        intents=context.intents,
        evaluations=evaluations,
        node_terms=partial(_node_terms, context.config),
        params=JobRuns(context.gate).params,
        logged=LoggedArtifacts(),
        checks=gate_checks(),
    )
    evaluations.models = models
    return models


def _node_terms(config: Config, zones: Sequence[str] | None) -> list[dict[str, Any]]:
    """The node selector terms for zones, by the labels that `kubernetes.zones` names."""
    from falaj.drivers.kubernetes.pods import zone_terms

    labels = {} if config.kubernetes is None else config.kubernetes.zones
    return zone_terms(None if zones is None else tuple(zones), labels)


def _accounts(context: ServiceContext) -> QueueAccounts:
    config = context.config
    return QueueAccounts(nodes=context.compute.nodes, prices=config.prices, half_life=config.queue.half_life)


def _queues(context: ServiceContext, accounts: QueueAccounts, held: ExitStack) -> Queues:
    return Queues(
        context.gate,
        context.intents,
        accounts=accounts,
        jobs=job_store,
        sealed=SealedValues(context.keyring, "comparisons"),
        wanted=context.intents.pending.set,
        kueue=_kueue(context.config.kubernetes, held),
        keep=context.config.keeps_kueue,
    )


def _maintenance(context: ServiceContext, held: ExitStack) -> NodeMaintenance | None:
    """Return what cordons the nodes of the clusters that jobs run on; none if they run on this machine."""
    cluster = context.config.kubernetes_of_jobs
    if cluster is None:
        return None
    maintenance = deferred(partial(drivers.open_maintenance, cluster.each_cluster(), context.home))
    held.callback(cast(Deferred, maintenance).close)
    return maintenance


def _kueue(cluster: KubernetesConfig | None, held: ExitStack) -> KueueCluster | None:
    """Return the only cluster, which the queues are rendered for; it is reached at the first use."""
    if cluster is None or cluster.clusters:
        return None
    inventory = deferred(partial(drivers.open_node_inventory, cluster))
    manifests = deferred(partial(drivers.open_manifests, cluster))
    held.callback(cast(Deferred, inventory).close)
    held.callback(cast(Deferred, manifests).close)
    return KueueCluster(cluster, inventory, manifests)


def _clusters(context: ServiceContext, held: ExitStack) -> Clusters:
    cluster = context.config.kubernetes
    if cluster is None:
        return Clusters(context.gate, {}, prefix="")
    known = {
        name: deferred(partial(drivers.open_namespaces, each))
        for name, each in cluster.each_cluster().items()
    }
    for each in known.values():
        held.callback(cast(Deferred, each).close)
    return Clusters(context.gate, known, prefix=cluster.prefix)


def _jobs(context: ServiceContext, contents: BlobContents, accounts: QueueAccounts) -> Jobs:
    return Jobs(
        context.gate,
        runs=JobRuns(context.gate),
        scheduler=scheduling,
        backend=context.compute,
        blobs=contents,
        accounts=accounts,
        wanted=context.intents.pending.set,
        unfinished_limit=context.config.jobs.unfinished_limit,
        waiting_limit=context.config.kueue_waiting_limit,
        can_grow=context.config.can_grow,
    )


def _features(
    context: ServiceContext,
    stores: dict[str, EncryptedBlobs],
    tables: Mapping[str, TableStore],
    held: ExitStack,
) -> Features:
    home, budget = context.home, open_budget(context.config)
    online = {zone: deferred(partial(drivers.open_online, home, context.config, zone)) for zone in stores}
    for store in online.values():
        held.callback(store.close)
    return Features(
        context.gate,
        blobs=stores,
        tables=tables,
        queries=deferred(partial(drivers.open_queries, home, budget)),
        parsers=context.parsers,
        budget=budget,
        online=online,
        sealed=SealedValues(context.keyring, "online"),
    )
