"""Open the drivers that falaj.toml names."""

from __future__ import annotations

from pathlib import Path

from falaj.assembly.config import reveal
from falaj.assembly.home import Home
from falaj.errors import ConfigInvalid
from falaj.ports.blobs import BlobStore
from falaj.ports.keys import KeyService
from falaj.ports.metadata import Database
from falaj.ports.online import OnlineStore
from falaj.ports.queries import QueryEngine
from falaj.ports.tables import TableStore
from falaj.ports.workflows import WorkflowEngine
from falaj.records.config import Config, Pkcs11Config, S3Bucket, ZoneConfig


def metadata_url(home: Home, config: Config) -> str:
    if config.metadata.url is None:
        return f"sqlite:///{home.database}"
    url = reveal(config.metadata.url, field="metadata.url")
    return url.replace("postgresql://", "postgresql+psycopg://", 1)


def open_metadata(home: Home, config: Config) -> Database:
    """Open the metadata database and migrate it to this version's schema."""
    from falaj.drivers.sql.database import open_database
    from falaj.drivers.sql.migrate import migrate

    url = metadata_url(home, config)
    migrate(url)
    return open_database(url)


def open_keys(home: Home, config: Config, *, first_start: bool) -> KeyService:
    """Open the key service; its keys are created at the first start only."""
    keys = config.keys
    if isinstance(keys, Pkcs11Config):
        from falaj.drivers.pkcs11.keys import Pkcs11Keys

        token = Pkcs11Keys.open_or_create if first_start else Pkcs11Keys.open
        return token(keys.module, keys.token, reveal(keys.pin, field="keys.pin"))
    from falaj.drivers.keyfile.keys import KeyFile

    return (KeyFile.open_or_create if first_start else KeyFile.open)(keys.path or home.key_file)


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


def open_tables(home: Home, zone: str) -> TableStore:
    from falaj.drivers.deltalake.tables import DeltaTables

    return DeltaTables(home.path / "tables" / zone)


def open_queries(home: Home) -> QueryEngine:
    from falaj.drivers.duckdb.queries import DuckDbQueryEngine

    return DuckDbQueryEngine(spill=home.path / "spill")


def open_online(home: Home, zone: str) -> OnlineStore:
    from falaj.drivers.lmdb.online import LmdbOnlineStore

    return LmdbOnlineStore(home.path / "online" / zone)


def open_workflows(home: Home, config: Config) -> WorkflowEngine:
    """Open the workflow engine; only the controller may do so."""
    from falaj.drivers.dbos.workflows import DbosWorkflows

    if config.metadata.url is None:
        return DbosWorkflows(f"sqlite:///{home.workflows}")
    return DbosWorkflows(metadata_url(home, config))


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
