"""Open the drivers that falaj.toml names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from falaj.assembly.config import reveal
from falaj.assembly.home import Home
from falaj.errors import ConfigInvalid, Conflict
from falaj.extras import requiring_packages
from falaj.ports.blobs import BlobStore
from falaj.ports.cluster.maintenance import NodeMaintenance
from falaj.ports.cluster.manifests import ManifestStore
from falaj.ports.cluster.namespaces import ClusterNamespaces
from falaj.ports.egress import Egress
from falaj.ports.keys import KeyService
from falaj.ports.machine.hardware import MigTool, NodeInventory
from falaj.ports.machine.memory import MemoryBudget
from falaj.ports.metadata import Database, Transaction
from falaj.ports.online import OnlinePlace, OnlineStore
from falaj.ports.queries import QueryEngine
from falaj.ports.tables import TableStore
from falaj.ports.workflows import WorkflowEngine
from falaj.records.config import Config, KubernetesConfig, Pkcs11Config, S3Bucket, ZoneConfig

T = TypeVar("T")


def metadata_url(home: Home, config: Config) -> str:
    if config.metadata.url is None:
        return f"sqlite:///{home.database}"
    url = reveal(config.metadata.url, field="metadata.url")
    return url.replace("postgresql://", "postgresql+psycopg://", 1)


def open_metadata(home: Home, config: Config) -> Database:
    """Open the metadata database and migrate it to this version's schema.

    Raise Conflict if a copy of this home uses it: both would take what the other one stores and runs for their own.
    """
    from falaj.drivers.sql.database import open_database
    from falaj.drivers.sql.migrate import migrate

    url = metadata_url(home, config)
    migrate(url)
    if not config.metadata.is_shared:
        return open_database(url)
    from falaj.drivers.sql.sessions import ALIVE_S, session_name

    name = session_name(home.ident, home.path)
    database = open_database(url, session=str(name))
    try:
        with database.read() as tx:
            hosts = name.hosts_of_copies(tx)
        if hosts:
            raise Conflict(
                f"a copy of the home {home.path} ({home.ident}) runs on {', '.join(hosts)}, with the same metadata "
                f"database. Stop it, if this home is to go on in its place (a machine that lost its power counts for "
                f"{ALIVE_S} s). A second machine needs a home of its own: a new directory with the same falaj.toml"
            )
    except BaseException:
        database.close()
        raise
    return database


def open_keys(home: Home, config: Config, *, first_start: bool) -> KeyService:
    """Open the key service; its keys are created at the first start only."""
    keys = config.keys
    if isinstance(keys, Pkcs11Config):
        with requiring_packages(for_="a PKCS#11 token"):
            from falaj.drivers.pkcs11.keys import Pkcs11Keys

        token = Pkcs11Keys.open_or_create if first_start else Pkcs11Keys.open
        return token(keys.module, keys.token, reveal(keys.pin, field="keys.pin"))
    from falaj.drivers.keyfile.keys import KeyFile

    return (KeyFile.open_or_create if first_start else KeyFile.open)(keys.path or home.key_file)


def open_egress(config: Config) -> Egress:
    from falaj.drivers.egress.http import HttpEgress

    return HttpEgress(config.egress.allow, ca=config.egress.ca)


def open_node_inventory(cluster: KubernetesConfig) -> NodeInventory:
    """Open the inventory of a cluster; it connects at the first use."""
    with requiring_packages(for_="a Kubernetes cluster"):
        from falaj.drivers.kubernetes.nodes import KubernetesNodes

    return KubernetesNodes(cluster)


def open_manifests(cluster: KubernetesConfig) -> ManifestStore:
    with requiring_packages(for_="a Kubernetes cluster"):
        from falaj.drivers.kubernetes.manifests import KubernetesManifests

    return KubernetesManifests(cluster)


def open_maintenance(clusters: Mapping[str | None, KubernetesConfig], home: Home) -> NodeMaintenance:
    """Open the maintenance of nodes of the only cluster, which has no name, or of several."""
    with requiring_packages(for_="a Kubernetes cluster"):
        from falaj.drivers.kubernetes.maintenance import KubernetesMaintenance
        from falaj.drivers.kubernetes.routing import RoutedMaintenance

    if None in clusters:
        return KubernetesMaintenance(clusters[None], home=home.ident)
    return RoutedMaintenance(
        {str(name): KubernetesMaintenance(each, home=home.ident) for name, each in clusters.items()}
    )


def open_namespaces(cluster: KubernetesConfig) -> ClusterNamespaces:
    """Open the namespaces of a cluster; it is reached at the first use."""
    with requiring_packages(for_="a Kubernetes cluster"):
        from falaj.drivers.kubernetes.client import connect
        from falaj.drivers.kubernetes.isolation.namespaces import KubernetesNamespaces

    return KubernetesNamespaces(cluster, partial(connect, cluster))


def open_mig_tool() -> MigTool:
    from falaj.drivers.machine.mig import NvidiaSmi

    return NvidiaSmi()


def open_blobs(home: Home, name: str, zone: ZoneConfig) -> BlobStore:
    from falaj.drivers.objectstore.blobs import local_blobs, s3_blobs

    if isinstance(zone.blobs, S3Bucket):
        s3 = zone.blobs
        return s3_blobs(
            s3.bucket,
            region=s3.region,
            endpoint=s3.endpoint,
            prefix=s3.prefix or None,
            access_key_id=reveal(s3.access_key, field=f"zones.{name}.blobs.access_key")
            if s3.access_key
            else None,
            secret_access_key=reveal(s3.secret_key, field=f"zones.{name}.blobs.secret_key")
            if s3.secret_key
            else None,
        )
    return local_blobs(zone.blobs.path or home.blobs / name)


def tables_folder(home: Home, config: Config, name: str) -> Path:
    """Return the folder of the tables of a zone."""
    return config.zones[name].tables.path or _place_in_zone(home, config, name, "tables")


def _place_in_zone(home: Home, config: Config, name: str, what: str) -> Path:
    """Return where `what` of a zone lies: below the zone's own folder, else in the home.

    What was written into the home before the zone had a folder stays there until it is moved; `falaj doctor` says how.
    Raise ConfigInvalid for a zone in a bucket that this machine is not in: its rows would lie here, not there.
    """
    blobs, at_home = config.zones[name].blobs, home.path / what / name
    if at_home.exists():
        return at_home
    if blobs.path is not None:
        return blobs.path / what / name
    if blobs.address is not None and config.machine_zone != name:
        raise ConfigInvalid.at(
            f"zones.{name}.{what}.path",
            given="nothing",
            allowed=f"a place in zone {name} for {what}: this machine is in zone {config.machine_zone or 'unknown'}",
            fix=f'[zones.{name}.{what}] path = "/mnt/{name}", or [node] zone = "{name}" if this machine is there',
        )
    return at_home


def open_tables(home: Home, config: Config, name: str) -> TableStore:
    from falaj.drivers.deltalake.tables import DeltaTables

    return DeltaTables(tables_folder(home, config, name))


def open_queries(home: Home, budget: MemoryBudget) -> QueryEngine:
    from falaj.drivers.duckdb.queries import DuckDbQueryEngine

    return DuckDbQueryEngine(spill=home.path / "spill", budget=budget)


def online_place(home: Home, config: Config, name: str) -> OnlinePlace | None:
    """Return where the online values of a zone lie; none if this machine has none.

    Raise ConfigInvalid for a zone elsewhere without a place for them.
    """
    online = config.zones[name].online
    if not online.is_here:
        return None
    file = online.path or _place_in_zone(home, config, name, "online")
    from falaj.drivers.lmdb.place import LmdbFile

    return LmdbFile(file)


def online_places(home: Home, config: Config) -> Iterator[tuple[str, OnlinePlace]]:
    """Yield the zones whose online values this machine has, and where; a zone elsewhere has none here."""
    for name in config.zones:
        with suppress(ConfigInvalid):
            if (place := online_place(home, config, name)) is not None:
                yield name, place


def open_online(home: Home, config: Config, name: str) -> OnlineStore:
    place = online_place(home, config, name)
    if place is None:
        raise Conflict(
            f"this machine has no online store of zone {name}: zones.{name}.online.driver is none in {home.toml}; "
            "ask a machine that has one"
        )
    return place.open()


def open_workflows(home: Home, config: Config) -> WorkflowEngine:
    """Open the workflow engine; only the controller may do so."""
    from falaj.drivers.dbos.workflows import DbosWorkflows

    if not config.metadata.is_shared:
        return DbosWorkflows(f"sqlite:///{home.workflows}")
    return DbosWorkflows(metadata_url(home, config))


def copy_metadata(
    home: Home, config: Config, folder: Path, ask: Callable[[Transaction], T], progress: Callable[[int], None]
) -> T:
    """Copy the metadata database as it is at one moment, with what `ask` reads at that moment.

    On PostgreSQL the state of workflows is in the same database, and is copied with it.
    """
    from falaj.drivers.dbos.workflows import SCHEMA
    from falaj.drivers.sql.snapshots import take_snapshot

    return take_snapshot(metadata_url(home, config), folder, ask, schemas=(SCHEMA,), progress=progress)


def copy_workflows(home: Home, config: Config, folder: Path, progress: Callable[[int], None]) -> None:
    """Copy the state of workflows, where it has a database of its own and one was made."""
    from falaj.drivers.sql.snapshots import take_snapshot

    if not config.metadata.is_shared and home.workflows.exists():
        take_snapshot(f"sqlite:///{home.workflows}", folder, lambda _tx: None, progress=progress)


def load_metadata(
    home: Home, config: Config, folder: Path, *, schema_version: str, progress: Callable[[int], None]
) -> None:
    """Fill an empty PostgreSQL database from a copy."""
    from falaj.drivers.dbos.workflows import SCHEMA, create_schema
    from falaj.drivers.sql.snapshots import load_snapshot, schemas_in

    url = metadata_url(home, config)
    prepare = (lambda: create_schema(url)) if SCHEMA in schemas_in(folder) else (lambda: None)
    load_snapshot(url, folder, schema_version=schema_version, prepare=prepare, progress=progress)


def policy_files(home: Home, config: Config) -> list[Path]:
    """Return the policy files that falaj.toml names, relative to the home; a pattern must match a file."""
    found: list[Path] = []
    for pattern in config.policies:
        fitting = sorted(home.path.glob(pattern))
        if not fitting:
            raise ConfigInvalid.at(
                "policies", given=pattern, allowed=f"a file in {home.path}, or a pattern that fits one"
            )
        found += fitting
    return found
