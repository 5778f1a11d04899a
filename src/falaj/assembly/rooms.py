"""Furnish the rooms: each gets the walls around it, its drivers, and the neighbours it asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from falaj import scheduling
from falaj.assembly import drivers
from falaj.assembly.deferred import deferred
from falaj.assembly.home import Home
from falaj.assembly.serving import LocalModelServer
from falaj.assembly.workbench import LocalWorkbench
from falaj.control.machines import Machines
from falaj.control.overview import Overview
from falaj.control.pipelines import Pipelines
from falaj.control.platform import Rooms, all_operations
from falaj.control.work import Intents, Works
from falaj.features import store as feature_store
from falaj.features import training_sets
from falaj.features.room import Features
from falaj.governance.audit.room import Audit
from falaj.governance.blob_bytes import BlobBytes
from falaj.governance.blobs import Blobs
from falaj.governance.catalogue import Objects, ZoneList
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.encryption.keyring import Keyring
from falaj.governance.encryption.room import Keys
from falaj.governance.encryption.values import SealedValues
from falaj.governance.gate import Gate
from falaj.governance.lineage import Lineage
from falaj.governance.policies import Policies
from falaj.governance.secrets import Secrets
from falaj.governance.tokens import Tokens
from falaj.governance.users import Groups, Users
from falaj.governance.workspaces import Workspaces
from falaj.monitoring.room import Monitoring
from falaj.optimization.room import Optimizations
from falaj.ports.keys import KeyService
from falaj.records.config import Config
from falaj.registry.models import Models
from falaj.scheduling.accounting.accounts import QueueAccounts
from falaj.scheduling.queues import Queues
from falaj.scheduling.usage import Usage
from falaj.serving.room import Endpoints
from falaj.tracking.job_runs import JobRuns
from falaj.tracking.runs import Runs
from falaj.training import figures
from falaj.training.jobs import Jobs


@dataclass(frozen=True, kw_only=True)
class Walls:
    """What stands before the rooms are furnished."""

    home: Home
    config: Config
    gate: Gate
    keyring: Keyring
    keys: KeyService
    intents: Intents
    audit: Audit
    workbench: LocalWorkbench


def build_rooms(walls: Walls) -> tuple[Rooms, Callable[[], None]]:
    """Every room, and what lets go of what they hold."""
    gate, held = walls.gate, ExitStack()
    stores = _stores(walls)
    features = _features(walls, stores, held)
    runs = Runs(gate)
    models = Models(gate, BlobBytes(gate.database, stores), walls.keys)
    accounts = _accounts(walls)
    rooms = Rooms(
        workspace=Workspaces(gate, walls.keyring),
        user=Users(gate),
        group=Groups(gate),
        token=Tokens(gate),
        policy=Policies(gate, all_operations()),
        object=Objects(gate),
        zone=ZoneList(gate),
        keys=Keys(gate, walls.keyring),
        secret=Secrets(gate, SealedValues(walls.keyring, "secrets")),
        blob=Blobs(gate, stores, walls.intents, platform=gate.audit.log_id),
        lineage=Lineage(gate),
        audit=walls.audit,
        work=Works(gate),
        platform=Overview(gate),
        runs=runs,
        node=Machines(gate, walls.workbench),
        jobs=_jobs(walls, runs, stores, accounts),
        queue=_queues(walls, accounts),
        usage=Usage(gate, accounts=accounts, jobs=figures),
        features=features,
        models=models,
        endpoints=_endpoints(walls, models, stores),
        monitoring=Monitoring(
            gate,
            training_set=partial(training_sets.stream, features._backing),
            sealed=SealedValues(walls.keyring, "monitoring"),
        ),
        optimization=Optimizations(
            gate,
            walls.intents,
            version=models._opened,
            columns=lambda tx, found: feature_store.training_set(tx, found).columns,
        ),
        pipelines=Pipelines(gate, BlobBytes(gate.database, stores), walls.intents),
    )
    return rooms, held.close


def _stores(walls: Walls) -> dict[str, EncryptedBlobs]:
    return {
        name: EncryptedBlobs(drivers.open_blobs(walls.home, name, zone), walls.keyring)
        for name, zone in walls.config.zones.items()
    }


def _endpoints(walls: Walls, models: Models, stores: dict[str, EncryptedBlobs]) -> Endpoints:
    return Endpoints(
        walls.gate,
        stores=stores,
        versions=models._opened,
        views=feature_store.view,
        server=LocalModelServer(walls.home),
    )


def _accounts(walls: Walls) -> QueueAccounts:
    config = walls.config
    return QueueAccounts(nodes=walls.workbench.nodes, prices=config.prices, half_life=config.queue.half_life)


def _queues(walls: Walls, accounts: QueueAccounts) -> Queues:
    return Queues(
        walls.gate,
        walls.intents,
        accounts=accounts,
        jobs=figures,
        sealed=SealedValues(walls.keyring, "comparisons"),
        wanted=walls.intents.wanted.set,
    )


def _jobs(walls: Walls, runs: Runs, stores: dict[str, EncryptedBlobs], accounts: QueueAccounts) -> Jobs:
    return Jobs(
        walls.gate,
        runs=JobRuns(runs),
        scheduler=scheduling,
        workbench=walls.workbench,
        blobs=BlobBytes(walls.gate.database, stores),
        accounts=accounts,
        wanted=walls.intents.wanted.set,
        unfinished_limit=walls.config.jobs.unfinished_limit,
    )


def _features(walls: Walls, stores: dict[str, EncryptedBlobs], held: ExitStack) -> Features:
    home = walls.home
    online = {zone: deferred(partial(drivers.open_online, home, zone)) for zone in stores}
    for store in online.values():
        held.callback(store.close)
    return Features(
        walls.gate,
        blobs=stores,
        tables={zone: deferred(partial(drivers.open_tables, home, zone)) for zone in stores},
        queries=deferred(partial(drivers.open_queries, home)),
        online=online,
        sealed=SealedValues(walls.keyring, "online"),
    )
