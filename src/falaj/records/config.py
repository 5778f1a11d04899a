"""What falaj.toml may say, and the defaults of everything it does not."""

from __future__ import annotations

import ipaddress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from falaj.records.names import Jurisdiction, Name, Spelled
from falaj.records.record import Record

Secret = Annotated[str, Spelled("(env|file):.+", "a secret is named by env:NAME or file:PATH", limit=1000)]
"""Where a secret is to be had: env:NAME or file:PATH. Secrets themselves do not stand in falaj.toml."""


def is_loopback(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"


class Tls(Record):
    """Certificate and private key, as PEM files. Only TLS 1.3 is spoken."""

    certificate: Path
    key: Path


class Server(Record):
    bind: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 7480
    tls: Tls | None = None
    body_limit_bytes: Annotated[int, Field(ge=1024, le=2**24)] = 2**20
    threads: Annotated[int, Field(ge=1, le=256)] = 32

    @model_validator(mode="after")
    def _tls_beyond_loopback(self) -> Server:
        if self.tls is None and not is_loopback(self.bind):
            raise ValueError(
                f"listening on {self.bind} without TLS is refused; set server.tls, or bind to 127.0.0.1"
            )
        return self


class Serving(Record):
    """Where the model server answers, and how often it writes down what it answered. TLS unless given is the API's.

    With `predictions = "forget"` answers are counted, but neither logged nor watched for drift, and cannot be labelled.
    """

    bind: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 7481
    tls: Tls | None = None
    log_every: Annotated[timedelta, Field(ge=timedelta(milliseconds=100), le=timedelta(minutes=5))] = (
        timedelta(seconds=5)
    )
    predictions: Literal["log", "forget"] = "log"


class Metadata(Record):
    """SQLite in the home, or a PostgreSQL whose URL is a secret because it may hold a password."""

    driver: Literal["sqlite", "postgres"] = "sqlite"
    url: Secret | None = None

    @model_validator(mode="after")
    def _url_for_postgres(self) -> Metadata:
        if (self.driver == "postgres") != (self.url is not None):
            raise ValueError('driver "postgres" needs a url ("env:NAME" or "file:PATH"), "sqlite" takes none')
        return self


class Files(Record):
    driver: Literal["files"] = "files"
    path: Path | None = None


class S3(Record):
    driver: Literal["s3"]
    bucket: str
    region: str = "us-east-1"
    endpoint: str | None = None
    prefix: str = ""
    access_key: Secret | None = None
    secret_key: Secret | None = None


def _driver(default: str) -> BeforeValidator:
    """Whoever names no driver means the default one."""
    return BeforeValidator(lambda given: {"driver": default} | given if isinstance(given, dict) else given)


class ZoneConfig(Record):
    """A zone: its jurisdiction, and where its blobs lie."""

    jurisdiction: Jurisdiction
    default: bool = False
    blobs: Annotated[Files | S3, Field(discriminator="driver"), _driver("files")] = Files()


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


class Config(Record):
    """The whole of falaj.toml."""

    server: Server = Server()
    serving: Serving = Serving()
    metadata: Metadata = Metadata()
    zones: Annotated[dict[Name, ZoneConfig], Field(min_length=1)] = {"local": ZoneConfig(jurisdiction="AE")}
    keys: Annotated[KeyFileConfig | Pkcs11Config, Field(discriminator="driver"), _driver("keyfile")] = (
        KeyFileConfig()
    )
    audit: AuditConfig = AuditConfig()
    policies: tuple[str, ...] = ()
    isolation: Literal["auto", "bubblewrap", "uid", "same-uid"] = "auto"

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
