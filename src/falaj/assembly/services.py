"""Build the services: each gets the gate, its drivers and the dependencies that it declares."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from falaj import scheduling
from falaj.assembly import drivers
from falaj.assembly.compute import LocalCompute
from falaj.assembly.deferred import deferred
from falaj.assembly.home import Home
from falaj.assembly.model_server import LocalModelServer
from falaj.control.pipelines.service import Pipelines
from falaj.control.service import Nodes, PlatformService
from falaj.control.services import Services, all_operations
from falaj.control.workflows.service import IntentQueue, Workflows
from falaj.features import store as feature_store
from falaj.features import training_sets
from falaj.features.service import Features
from falaj.governance.audit.service import Audit
from falaj.governance.blobs.contents import BlobContents
from falaj.governance.blobs.service import Blobs
from falaj.governance.catalog.service import Objects
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.encryption.keyring import Keyring
from falaj.governance.encryption.service import Keys
from falaj.governance.encryption.values import SealedValues
from falaj.governance.identity.service import Groups, Tokens, Users, Workspaces
from falaj.governance.lineage.service import Lineage
from falaj.governance.operations.gate import Gate
from falaj.governance.policy.service import Policies
from falaj.governance.residency.service import Zones
from falaj.governance.secrets.service import Secrets
from falaj.monitoring.service import Monitoring
from falaj.optimization.service import Optimizations
from falaj.ports.keys import KeyService
from falaj.records.config import Config
from falaj.registry.service import Models
from falaj.scheduling.accounting.accounts import QueueAccounts
from falaj.scheduling.service import Queues, Usage
from falaj.serving.service import Endpoints
from falaj.tracking.job_runs import JobRuns
from falaj.tracking.service import Runs
from falaj.training import store as job_store
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
    audit: Audit
    compute: LocalCompute


def build_services(context: ServiceContext) -> tuple[Services, Callable[[], None]]:
    """Return every service, and the function that closes their drivers."""
    gate, held = context.gate, ExitStack()
    stores = _stores(context)
    features = _features(context, stores, held)
    runs = Runs(gate)
    models = Models(gate, BlobContents(gate.database, stores), context.keys)
    accounts = _accounts(context)
    services = Services(
        workspaces=Workspaces(gate, context.keyring),
        users=Users(gate),
        groups=Groups(gate),
        tokens=Tokens(gate),
        policies=Policies(gate, all_operations()),
        objects=Objects(gate),
        zones=Zones(gate),
        keys=Keys(gate, context.keyring),
        secrets=Secrets(gate, SealedValues(context.keyring, "secrets")),
        blobs=Blobs(gate, stores, context.intents, platform=gate.audit.log_id),
        lineage=Lineage(gate),
        audit=context.audit,
        workflows=Workflows(gate),
        platform=PlatformService(gate),
        runs=runs,
        nodes=Nodes(gate, context.compute),
        jobs=_jobs(context, runs, stores, accounts),
        queues=_queues(context, accounts),
        usage=Usage(gate, accounts=accounts, jobs=job_store),
        features=features,
        models=models,
        endpoints=_endpoints(context, models, stores),
        monitoring=Monitoring(
            gate,
            training_set=partial(training_sets.stream, features.backends),
            sealed=SealedValues(context.keyring, "monitoring"),
        ),
        optimization=Optimizations(
            gate,
            context.intents,
            version=models.open_version,
            columns=lambda tx, found: feature_store.load_training_set(tx, found).columns,
        ),
        pipelines=Pipelines(gate, BlobContents(gate.database, stores), context.intents),
    )
    return services, held.close


def _stores(context: ServiceContext) -> dict[str, EncryptedBlobs]:
    return {
        name: EncryptedBlobs(drivers.open_blobs(context.home, name, zone), context.keyring)
        for name, zone in context.config.zones.items()
    }


def _endpoints(context: ServiceContext, models: Models, stores: dict[str, EncryptedBlobs]) -> Endpoints:
    return Endpoints(
        context.gate,
        stores=stores,
        versions=models.open_version,
        views=feature_store.find_view,
        server=LocalModelServer(context.home),
    )


def _accounts(context: ServiceContext) -> QueueAccounts:
    config = context.config
    return QueueAccounts(nodes=context.compute.nodes, prices=config.prices, half_life=config.queue.half_life)


def _queues(context: ServiceContext, accounts: QueueAccounts) -> Queues:
    return Queues(
        context.gate,
        context.intents,
        accounts=accounts,
        jobs=job_store,
        sealed=SealedValues(context.keyring, "comparisons"),
        wanted=context.intents.pending.set,
    )


def _jobs(
    context: ServiceContext, runs: Runs, stores: dict[str, EncryptedBlobs], accounts: QueueAccounts
) -> Jobs:
    return Jobs(
        context.gate,
        runs=JobRuns(runs),
        scheduler=scheduling,
        backend=context.compute,
        blobs=BlobContents(context.gate.database, stores),
        accounts=accounts,
        wanted=context.intents.pending.set,
        unfinished_limit=context.config.jobs.unfinished_limit,
    )


def _features(context: ServiceContext, stores: dict[str, EncryptedBlobs], held: ExitStack) -> Features:
    home = context.home
    online = {zone: deferred(partial(drivers.open_online, home, zone)) for zone in stores}
    for store in online.values():
        held.callback(store.close)
    return Features(
        context.gate,
        blobs=stores,
        tables={zone: deferred(partial(drivers.open_tables, home, zone)) for zone in stores},
        queries=deferred(partial(drivers.open_queries, home)),
        online=online,
        sealed=SealedValues(context.keyring, "online"),
    )
