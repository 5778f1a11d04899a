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
from falaj.governance.events.service import Events, Webhooks
from falaj.governance.identity.service import Groups, Tokens, Users, Workspaces
from falaj.governance.lineage.service import Lineage
from falaj.governance.operations.gate import Gate
from falaj.governance.policy.service import Policies
from falaj.governance.residency.service import Zones
from falaj.governance.secrets.service import Secrets
from falaj.monitoring.service import Monitoring
from falaj.optimization.hardware import instruction_set
from falaj.optimization.service import DatasetColumns, Optimizations
from falaj.optimization.serving_variants import choose_variant
from falaj.ports.cluster.maintenance import NodeMaintenance
from falaj.ports.keys import KeyService
from falaj.ports.metadata import Database, Transaction
from falaj.ports.parsers import ParserPool
from falaj.ports.tables import TableKey, TableStore
from falaj.records.config import Config, KubernetesConfig
from falaj.records.governance.objects import StoredObject
from falaj.registry.aliases import ServingApprovals
from falaj.registry.service import Models
from falaj.scheduling.accounting.accounts import QueueAccounts
from falaj.scheduling.kueue.sync import KueueCluster
from falaj.scheduling.service import Queues, Usage
from falaj.serving.batch_predictions.service import Predictions
from falaj.serving.service import Endpoints
from falaj.tracking.job_runs import JobRuns
from falaj.tracking.service import Runs
from falaj.training import store as job_store
from falaj.training.queue import QueueReader
from falaj.training.service import Jobs


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
    runs = Runs(gate)
    models = _models(context, stores)
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
        events=Events(gate),
        webhooks=_webhooks(context),
        blobs=Blobs(gate, stores, context.intents, platform=gate.audit.log_id),
        lineage=Lineage(gate),
        audit=Audit(
            gate,
            gate.audit,
            context.keys,
            stores=AuditedStores(
                lambda zone, workspace, key: stores[zone].read(workspace, key),
                table_digests(gate.database, tables),
            ),
        ),
        workflows=Workflows(gate),
        platform=PlatformService(gate, context.keys, context.compute),
        runs=runs,
        nodes=_nodes(context, accounts, held),
        clusters=_clusters(context, held),
        jobs=_jobs(context, runs, stores, accounts),
        queues=_queues(context, accounts, held),
        usage=Usage(gate, accounts=accounts, jobs=job_store),
        features=features,
        models=models,
        endpoints=_endpoints(context, models, stores, TrainingStatistics(features.backends)),
        monitoring=Monitoring(
            gate,
            training_set=partial(training_sets.stream, features.backends),
            sealed=SealedValues(context.keyring, "monitoring"),
        ),
        optimization=_optimizations(context, models),
        predictions=Predictions(gate, context.intents, version=models.open_version),
        pipelines=Pipelines(gate, BlobContents(gate.database, stores), context.intents),
    )
    return services, held.close


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
    """Return the events that there are, by the names of their operations; an alert is one without an operation."""
    emitting = (name for name, each in all_operations().items() if each.emits and not each.mode.reads)
    return frozenset({*emitting, "monitoring.alert"})


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
        if in_use is None:
            return {each: tables[zone].file_hashes(table, version=each).digest for each in versions}
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


def _models(context: ServiceContext, stores: Mapping[str, EncryptedBlobs]) -> Models:
    return Models(
        context.gate,
        BlobContents(context.gate.database, stores),
        context.keys,
        parsers=context.parsers,
        node_terms=partial(_node_terms, context.config),
    )


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
    cluster = context.config.kubernetes
    if cluster is None or context.config.jobs.launcher != "kubernetes":
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


def _jobs(
    context: ServiceContext, runs: Runs, stores: dict[str, EncryptedBlobs], accounts: QueueAccounts
) -> Jobs:
    return Jobs(
        context.gate,
        runs=JobRuns(runs),
        scheduler=scheduling,
        backend=context.compute,
        blobs=BlobContents(context.gate.database, stores, platform=context.gate.audit.log_id),
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
