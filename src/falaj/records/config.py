"""The settings of falaj.toml and their defaults."""

from __future__ import annotations

import ipaddress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from falaj.records.durations import read_duration
from falaj.records.names import Jurisdiction, Name, TextRule
from falaj.records.record import Record
from falaj.records.scheduling.hardware import MPS_DIRECTORY
from falaj.records.sizes import RULE, read_size

Secret = Annotated[str, TextRule("(env|file):.+", "a secret is named by env:NAME or file:PATH", limit=1000)]
"""A reference to a secret: env:NAME or file:PATH. Secrets themselves are never in falaj.toml."""


Price = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


def is_loopback(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"


class Tls(Record):
    """Certificate and private key, as PEM files. Only TLS 1.3 is spoken."""

    certificate: Path
    key: Path


class ServerConfig(Record):
    bind: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 7480
    tls: Tls | None = None
    body_limit_bytes: Annotated[int, Field(ge=1024, le=2**24)] = 2**20
    threads: Annotated[int, Field(ge=1, le=256)] = 32

    @model_validator(mode="after")
    def _tls_beyond_loopback(self) -> ServerConfig:
        if self.tls is None and not is_loopback(self.bind):
            raise ValueError(
                f"listening on {self.bind} without TLS is refused; set server.tls, or bind to 127.0.0.1"
            )
        return self


class ServingConfig(Record):
    """The model server: its address, and how often it stores predictions. By default it uses the TLS of the API.

    With `predictions = "forget"` answers are counted, but neither logged nor watched for drift, and cannot be labelled.
    """

    bind: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 7481
    tls: Tls | None = None
    log_every: Annotated[timedelta, Field(ge=timedelta(milliseconds=100), le=timedelta(minutes=5))] = (
        timedelta(seconds=5)
    )
    predictions: Literal["log", "forget"] = "log"


class MetadataConfig(Record):
    """SQLite in the home, or a PostgreSQL whose URL is a secret because it may hold a password."""

    driver: Literal["sqlite", "postgres"] = "sqlite"
    url: Secret | None = None

    @model_validator(mode="after")
    def _url_for_postgres(self) -> MetadataConfig:
        if (self.driver == "postgres") != (self.url is not None):
            raise ValueError('driver "postgres" needs a url ("env:NAME" or "file:PATH"), "sqlite" takes none')
        return self


class LocalFiles(Record):
    driver: Literal["files"] = "files"
    path: Path | None = None


class S3Bucket(Record):
    driver: Literal["s3"]
    bucket: str
    region: str = "us-east-1"
    endpoint: str | None = None
    prefix: str = ""
    access_key: Secret | None = None
    secret_key: Secret | None = None


def _driver(default: str) -> BeforeValidator:
    """Return a validator that adds the default driver."""
    return BeforeValidator(lambda given: {"driver": default} | given if isinstance(given, dict) else given)


class ZoneConfig(Record):
    """A zone: its jurisdiction, and where its blobs lie."""

    jurisdiction: Jurisdiction
    default: bool = False
    blobs: Annotated[LocalFiles | S3Bucket, Field(discriminator="driver"), _driver("files")] = LocalFiles()


class KeyFileConfig(Record):
    driver: Literal["keyfile"] = "keyfile"
    path: Path | None = None


class Pkcs11Config(Record):
    driver: Literal["pkcs11"]
    module: Path
    token: str
    pin: Secret


class AuditConfig(Record):
    witness: Path | None = None
    sign_every: timedelta = timedelta(seconds=1)


def _length(given: object) -> object:
    """A length of time as people write it: 90s, 12h; or as TOML knows it, in seconds."""
    return read_duration(given) or given


def _size(given: object) -> object:
    """An amount as people write it: 200GiB; or as TOML knows it, in bytes."""
    if isinstance(given, str) and (size := read_size(given)) is None:
        raise ValueError(RULE)
    return size if isinstance(given, str) else given


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("the folder of a virtualenv, from / on")
    return path


Virtualenv = Annotated[Path, AfterValidator(_absolute)]


class JobsConfig(Record):
    """The settings of jobs.

    A job that makes room for another has `preemption_grace` to save itself. A workspace has at most `unfinished_limit`
    jobs that wait or run. One checkpoint of a job takes at most `checkpoint_limit`, like "200GiB"; a twentieth of the
    disk stays free beside all of them, at most 10 GiB. `environments` are virtualenvs by the names under which jobs ask
    for them.
    """

    preemption_grace: Annotated[
        timedelta, BeforeValidator(_length), Field(ge=timedelta(0), le=timedelta(hours=1))
    ] = timedelta(seconds=60)
    unfinished_limit: Annotated[int, Field(ge=1, le=10_000_000)] = 10_000
    checkpoint_limit: Annotated[int, BeforeValidator(_size), Field(ge=1 << 20)] = 1 << 40
    environments: dict[Name, Virtualenv] = {}


class Prices(Record):
    """The prices of an hour and of energy. A GPU whose model is not named costs `gpu_hour`."""

    currency: Annotated[str, TextRule("[A-Z]{3}", "a currency is three capital letters, like AED", limit=3)]
    cpu_hour: Price = 0.0
    gpu_hour: Price = 0.0
    gpu_models: dict[str, Price] = {}
    energy_kwh: Price = 0.0


class QueueConfig(Record):
    """The settings of queues. Fair share: resources held `half_life` ago count half."""

    half_life: Annotated[
        timedelta, BeforeValidator(_length), Field(ge=timedelta(minutes=1), le=timedelta(days=3650))
    ] = timedelta(days=7)


class NodeConfig(Record):
    """This machine as jobs see it: the pool it is in, further labels, and where NVIDIA's MPS daemon listens on it.

    `cgroup` is one (version 2) made for jobs, below which each has its own; without it, one that systemd delegated.

    Labels such as isa-avx512 and gpu-nvidia-h200 are found, and need not stand here.
    """

    pool: Name = "default"
    labels: tuple[Name, ...] = ()
    mps: Path = Path(MPS_DIRECTORY)
    cgroup: Path | None = None


class Config(Record):
    """The whole of falaj.toml."""

    server: ServerConfig = ServerConfig()
    serving: ServingConfig = ServingConfig()
    metadata: MetadataConfig = MetadataConfig()
    zones: Annotated[dict[Name, ZoneConfig], Field(min_length=1)] = {"local": ZoneConfig(jurisdiction="AE")}
    keys: Annotated[KeyFileConfig | Pkcs11Config, Field(discriminator="driver"), _driver("keyfile")] = (
        KeyFileConfig()
    )
    audit: AuditConfig = AuditConfig()
    policies: tuple[str, ...] = ()
    isolation: Literal["auto", "bubblewrap", "landlock", "uid", "same-uid", "none"] = "auto"
    jobs: JobsConfig = JobsConfig()
    queue: QueueConfig = QueueConfig()
    prices: Prices | None = None
    node: NodeConfig = NodeConfig()

    @property
    def tls_of_serving(self) -> Tls | None:
        return self.serving.tls or self.server.tls

    @model_validator(mode="after")
    def _serving_has_tls_beyond_loopback(self) -> Config:
        if self.tls_of_serving is None and not is_loopback(self.serving.bind):
            raise ValueError(
                f"serving.bind {self.serving.bind} without TLS is refused; set serving.tls, or bind to 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _one_default_zone(self) -> Config:
        chosen = [name for name, zone in self.zones.items() if zone.default]
        if len(chosen) > 1:
            raise ValueError(f"zones {', '.join(chosen)} are all marked default; only one can be")
        return self
