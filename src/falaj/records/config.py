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
    """PEM file with the certificate and its chain."""
    key: Path
    """PEM file with the private key."""


class ServerConfig(Record):
    bind: str = "127.0.0.1"
    """Address of the API; beyond loopback only with `server.tls`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7480
    """Port of the API; 0 takes a free one."""
    tls: Tls | None = None
    """Certificate and key of the API; TLS 1.3 only."""
    body_limit_bytes: Annotated[int, Field(ge=1024, le=2**24)] = 2**20
    """Largest JSON body of a request; uploads are streams and have no limit."""
    threads: Annotated[int, Field(ge=1, le=256)] = 32
    """Operations at a time."""

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
    """Address of the model server, which runs once something is deployed; beyond loopback only with TLS."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7481
    """Port of the model server; 0 takes a free one."""
    tls: Tls | None = None
    """Certificate and key of the model server; by default those of the API."""
    log_every: Annotated[timedelta, Field(ge=timedelta(milliseconds=100), le=timedelta(minutes=5))] = (
        timedelta(seconds=5)
    )
    """How often predictions, counts and sketches are stored; kill -9 loses that much."""
    predictions: Literal["log", "forget"] = "log"
    """forget: answers are counted only; no log, no labels, no drift."""


class MetadataConfig(Record):
    """SQLite in the home, or a PostgreSQL whose URL is a secret because it may hold a password."""

    driver: Literal["sqlite", "postgres"] = "sqlite"
    """Database of metadata; sqlite is a file in the home."""
    url: Secret | None = None
    """Address of PostgreSQL, only with `driver = "postgres"`; it may hold a password."""

    @model_validator(mode="after")
    def _url_for_postgres(self) -> MetadataConfig:
        if (self.driver == "postgres") != (self.url is not None):
            raise ValueError('driver "postgres" needs a url ("env:NAME" or "file:PATH"), "sqlite" takes none')
        return self


class LocalFiles(Record):
    driver: Literal["files"] = "files"
    """Where the bytes of the zone lie."""
    path: Path | None = None
    """Folder of the blobs; by default in the home."""


class S3Bucket(Record):
    driver: Literal["s3"]
    bucket: str
    """Name of the bucket."""
    region: str = "us-east-1"
    """Region of the bucket."""
    endpoint: str | None = None
    """Address of a store other than AWS."""
    prefix: str = ""
    """Beginning of the keys of all blobs."""
    access_key: Secret | None = None
    """Access key; give both keys, or neither."""
    secret_key: Secret | None = None
    """Secret of the access key."""


def _driver(default: str) -> BeforeValidator:
    """Return a validator that adds the default driver."""
    return BeforeValidator(lambda given: {"driver": default} | given if isinstance(given, dict) else given)


class ZoneConfig(Record):
    """A zone: its jurisdiction, and where its blobs lie."""

    jurisdiction: Jurisdiction
    """Country whose law applies there, as two capital letters."""
    default: bool = False
    """Whether bytes go there unless told otherwise; else the first zone is the default."""
    blobs: Annotated[LocalFiles | S3Bucket, Field(discriminator="driver"), _driver("files")] = LocalFiles()


class KeyFileConfig(Record):
    driver: Literal["keyfile"] = "keyfile"
    """Where the root key is."""
    path: Path | None = None
    """Key file; by default in the configuration directory."""


class Pkcs11Config(Record):
    driver: Literal["pkcs11"]
    module: Path
    """PKCS#11 library of the HSM."""
    token: str
    """Label of the token."""
    pin: Secret
    """PIN of the token."""


class AuditConfig(Record):
    witness: Path | None = None
    """File in which signed heads are kept outside the database; by default in the configuration directory."""
    sign_every: timedelta = timedelta(seconds=1)
    """How often the head of the audit log is signed."""


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
    """Time in which a preempted job can save a checkpoint."""
    unfinished_limit: Annotated[int, Field(ge=1, le=10_000_000)] = 10_000
    """Largest number of jobs of a workspace that wait or run."""
    checkpoint_limit: Annotated[int, BeforeValidator(_size), Field(ge=1 << 20)] = 1 << 40
    """Largest size of one checkpoint of a job; a twentieth of the disk, at most 10 GiB, stays free besides."""
    environments: dict[Name, Virtualenv] = {}
    """Virtualenvs by name, each the absolute path of its folder, which jobs may ask for; see
    [frameworks](frameworks.md)."""


class Prices(Record):
    """The prices of an hour and of energy. A GPU whose model is not named costs `gpu_hour`."""

    currency: Annotated[str, TextRule("[A-Z]{3}", "a currency is three capital letters, like AED", limit=3)]
    """Three capital letters, like AED."""
    cpu_hour: Price = 0.0
    """Price of an hour of a CPU."""
    gpu_hour: Price = 0.0
    """Price of an hour of a GPU whose model is not in `gpu_models`."""
    gpu_models: dict[str, Price] = {}
    """Price of an hour by model, like `"NVIDIA H200" = 12.5`."""
    energy_kwh: Price = 0.0
    """Price of a kWh of energy that was measured."""


class QueueConfig(Record):
    """The settings of queues. Fair share: resources held `half_life` ago count half."""

    half_life: Annotated[
        timedelta, BeforeValidator(_length), Field(ge=timedelta(minutes=1), le=timedelta(days=3650))
    ] = timedelta(days=7)
    """Fair share: resources that a queue held so long ago count half; see [queues](queues.md)."""


class NodeConfig(Record):
    """This machine as jobs see it: the pool it is in, further labels, and where NVIDIA's MPS daemon listens on it.

    `cgroup` is one (version 2) made for jobs, below which each has its own; without it, one that systemd delegated.

    Labels such as isa-avx512 and gpu-nvidia-h200 are found, and need not stand here.
    """

    pool: Name = "default"
    """Pool of this machine, for jobs that ask for one; see [hardware](hardware.md)."""
    labels: tuple[Name, ...] = ()
    """Labels of this machine, beside those that are detected."""
    mps: Path = Path(MPS_DIRECTORY)
    """Folder in which NVIDIA's MPS daemon listens."""
    cgroup: Path | None = None
    """A cgroup (version 2) made for jobs, without processes of its own; see [limits](limits.md)."""


class Config(Record):
    """The whole of falaj.toml."""

    server: ServerConfig = ServerConfig()
    serving: ServingConfig = ServingConfig()
    metadata: MetadataConfig = MetadataConfig()
    zones: Annotated[dict[Name, ZoneConfig], Field(min_length=1)] = {"local": ZoneConfig(jurisdiction="AE")}
    """Zones by name; by default one, `local`, in AE."""
    keys: Annotated[KeyFileConfig | Pkcs11Config, Field(discriminator="driver"), _driver("keyfile")] = (
        KeyFileConfig()
    )
    audit: AuditConfig = AuditConfig()
    policies: tuple[str, ...] = ()
    """Cedar files, relative to the home."""
    isolation: Literal["auto", "bubblewrap", "landlock", "uid", "same-uid", "none"] = "auto"
    """Sandbox of user code; auto takes the strongest that works, none runs jobs with the platform's own rights; see
    [security](../explanation/security.md)."""
    jobs: JobsConfig = JobsConfig()
    queue: QueueConfig = QueueConfig()
    prices: Prices | None = None
    """Prices for the accounting of usage; without them there is none of money."""
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
