"""Assemble the platform: drivers, governance, services."""

from __future__ import annotations

import getpass
import logging
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from falaj.assembly import drivers
from falaj.assembly.compute import LocalCompute
from falaj.assembly.config import read_config
from falaj.assembly.deferred import deferred
from falaj.assembly.home import Home
from falaj.assembly.parsing import open_parsers
from falaj.assembly.services import ServiceContext, build_services
from falaj.assembly.stores import require_shared_stores
from falaj.control.lease import current_fence
from falaj.control.services import Services, all_operations
from falaj.control.workflows.service import IntentQueue
from falaj.errors import Damaged, Fault, Tampered
from falaj.governance import bootstrap, objects
from falaj.governance.audit.log import AuditLog, read_log_id
from falaj.governance.audit.witness import Witness
from falaj.governance.encryption.keyring import Keyring
from falaj.governance.identity.directory import Authenticator, BuiltInDirectory, is_still_valid
from falaj.governance.identity.failures import FailedAuthentications
from falaj.governance.operations.caller import Caller, start_thread
from falaj.governance.operations.gate import Gate
from falaj.governance.policy.authorizer import Authorizer
from falaj.governance.policy.engine import PolicyText
from falaj.governance.residency.zones import ZoneRegistry
from falaj.ports.keys import KeyService
from falaj.ports.metadata import Database
from falaj.ports.parsers import ParserPool
from falaj.records.config import Config
from falaj.records.governance.residency import Zone
from falaj.records.names import ROOT, PrincipalId
from falaj.records.record import utc_now

log = logging.getLogger("falaj.assembly")

LOST_WRITES = "restore the newest backup; to go on without what was lost: falaj audit accept --reason TEXT"


@dataclass(frozen=True)
class LocalPlatform:
    """A platform in this process: the services and what they run on."""

    home: Home
    config: Config
    database: Database
    keys: KeyService
    audit: AuditLog
    gate: Gate
    services: Services
    authenticator: Authenticator
    failures: FailedAuthentications
    intents: IntentQueue
    compute: LocalCompute
    parsers: ParserPool
    agent_key: bytes
    close_services: Callable[[], None]
    close_audit: Callable[[], None]

    def close(self) -> None:
        """Sign the last audit head and close everything."""
        self.close_audit()
        self.close_services()
        self.compute.close()
        self.parsers.close()
        self.keys.close()
        self.database.close()


def assemble(
    home: Home,
    *,
    config: Config | None = None,
    as_owner: bool = False,
    clock: Callable[[], datetime] = utc_now,
) -> LocalPlatform:
    """Return the platform of `home`. `as_owner`: the local user acts where no interface has set a caller."""
    config = config or read_config(home.toml)
    with ExitStack() as undo:
        database = drivers.open_metadata(home, config)
        undo.callback(database.close)
        keys = drivers.open_keys(home, config, first_start=_is_first_start(database, home, config))
        undo.callback(keys.close)
        made = _assemble(home, config, database, keys, as_owner=as_owner, clock=clock)
        undo.pop_all()
    return made


def _assemble(
    home: Home,
    config: Config,
    database: Database,
    keys: KeyService,
    *,
    as_owner: bool,
    clock: Callable[[], datetime],
) -> LocalPlatform:
    keyring = Keyring(database, keys)
    witness = config.audit.witness or home.witness
    gate = _gate(home, config, database, keyring, keys, witness=witness, as_owner=as_owner, clock=clock)
    require_shared_stores(home, config, database)
    failures = FailedAuthentications(gate.audit, clock)
    intents = IntentQueue()
    agent_key = keyring.derived("job agent")
    compute = LocalCompute(home, config, database, gate.zones.here, agent_key=agent_key)
    parsers = deferred(partial(open_parsers, home, config))
    services, close_services = build_services(
        ServiceContext(
            home=home,
            config=config,
            gate=gate,
            keyring=keyring,
            keys=keys,
            intents=intents,
            compute=compute,
            parsers=parsers,
        )
    )
    return LocalPlatform(
        home=home,
        config=config,
        database=database,
        keys=keys,
        audit=gate.audit,
        gate=gate,
        services=services,
        authenticator=Authenticator([BuiltInDirectory(database, clock)], database),
        failures=failures,
        intents=intents,
        compute=compute,
        parsers=parsers,
        agent_key=agent_key,
        close_services=close_services,
        close_audit=_sign_heads(gate, failures, every_s=config.audit.sign_every.total_seconds()),
    )


def _gate(
    home: Home,
    config: Config,
    database: Database,
    keyring: Keyring,
    keys: KeyService,
    *,
    witness: Path,
    as_owner: bool,
    clock: Callable[[], datetime],
) -> Gate:
    log_id = _found_once(database, keyring, home, clock())
    kept = Witness(witness, keys, log_id=log_id, home=home.ident)
    audit = AuditLog(database, keys=keys, derive=keyring.derived, log_id=log_id, witness=kept)
    _require_last_writes(audit, as_owner=as_owner)
    with database.write() as tx:
        audit.begin(tx, caller=local_user(), now=clock())
    return Gate(
        database,
        authorizer=Authorizer(all_operations().values(), files=_policy_texts(home, config)),
        audit=audit,
        zones=ZoneRegistry(
            _zones(config),
            here=config.machine_zone,
            networks={name: zone.networks for name, zone in config.zones.items() if zone.networks},
        ),
        seal=keyring,
        fence=current_fence,
        owner=local_caller(database) if as_owner else None,
        holds=is_still_valid,
        clock=clock,
        cursor_key=keyring.derived("page cursor"),
        failing=lambda: home.platform().get("failing", {}),
    )


def local_user() -> str:
    """Return the name of the local user on the platform."""
    name = re.sub(r"[^a-z0-9]+", "-", getpass.getuser().lower()).strip("-")
    return name or "owner"


def local_caller(database: Database) -> Caller:
    """Return the local user, as the owner of this home."""
    with database.read() as tx:
        person = objects.resolve(tx, local_user(), kind="user", workspace=ROOT)
    return Caller(PrincipalId(person.id), person.name, "user", "local")


def _is_first_start(database: Database, home: Home, config: Config) -> bool:
    """Tell whether the database is empty; raise Damaged if the witness knows of an audit log."""
    with database.read() as tx:
        if bootstrap.is_bootstrapped(tx):
            return False
    witness = config.audit.witness or home.witness
    if witness.exists() and witness.stat().st_size:
        raise Damaged(
            f"the metadata database is empty, but {witness} knows of an audit log; restore the database, or remove "
            "that file to begin anew"
        )
    return True


def _found_once(database: Database, keyring: Keyring, home: Home, now: datetime) -> str:
    with database.write() as tx:
        if not bootstrap.is_bootstrapped(tx):
            bootstrap.bootstrap(tx, keyring, administrator=local_user(), now=now)
        bootstrap.remember_home(tx, home.ident)
        return read_log_id(tx)


def _zones(config: Config) -> list[Zone]:
    return [
        Zone(name=name, jurisdiction=zone.jurisdiction, default=name == config.default_zone)
        for name, zone in config.zones.items()
    ]


def _require_last_writes(audit: AuditLog, *, as_owner: bool) -> None:
    """Raise Damaged if the database lost writes that were signed; the owner is told so, and can accept it."""
    for problem in audit.unbound():
        if not as_owner:
            given = Fault(where="metadata database", given=problem, fix=LOST_WRITES)
            raise Damaged("the metadata database has lost its last writes", faults=[given])
        log.critical(
            "the metadata database has lost its last writes: %s To mend it: %s", problem, LOST_WRITES
        )


def _policy_texts(home: Home, config: Config) -> list[PolicyText]:
    return [PolicyText(f"file:{path.name}", path.read_text()) for path in drivers.policy_files(home, config)]


def _sign_heads(gate: Gate, failures: FailedAuthentications, *, every_s: float) -> Callable[[], None]:
    """Append windows that ended and sign heads, in a thread, and once more at the end."""
    stop = threading.Event()
    refused = [""]

    def sign() -> None:
        try:
            gate.audit.sign_head()
            refused[0] = ""
        except Tampered as error:
            if str(error) != refused[0]:
                log.critical("the audit log was tampered with, run `falaj audit verify`: %s", error)
            refused[0] = str(error)

    def keep() -> None:
        while not stop.wait(every_s):
            try:
                gate.hot.flush()
                failures.flush()
                sign()
            except Exception:
                log.exception("failed to sign the audit log; retrying")

    thread = start_thread(keep, name="audit-heads")

    def finish() -> None:
        stop.set()
        thread.join()
        gate.hot.flush(all_windows=True)
        failures.flush(whole_window=False)
        sign()

    return finish
