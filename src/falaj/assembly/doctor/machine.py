"""The checks of the machine that a platform runs on: Python, disk, isolation, port, clock, optional packages."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from falaj.assembly import drivers
from falaj.assembly.doctor.findings import DoctorContext, fail, ok, warn
from falaj.assembly.parsing import open_parsers
from falaj.extras import EXTRAS
from falaj.governance import isolation
from falaj.governance.bootstrap import count_users
from falaj.records.config import Pkcs11Config
from falaj.records.control.tls import is_loopback
from falaj.records.doctor import Finding

OLDEST_PYTHON = (3, 11)
LONG_AGO = 1_767_225_600  # 2026-01-01: a clock that stands before it was never set
SKEW_S = 60


def check_python() -> Finding:
    here = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        return fail("python", here, fix="install Python 3.11 or newer")
    return ok("python", here)


def check_encryption(context: DoctorContext) -> Iterable[Finding]:
    note = "blobs are encrypted by Falaj; tables and metadata are not"
    place = next(folder for folder in (context.home.path, *context.home.path.parents) if folder.exists())
    if _is_encrypted(os.stat(place).st_dev):
        yield ok("encryption", f"{note}, but the home lies on an encrypted volume")
    else:
        words = f"{note}, and no encrypted volume shows under the home"
        yield warn("encryption", words, fix="put the home on an encrypted volume")


def _is_encrypted(device: int) -> bool:
    """Whether `device`, or one that it is built on, is one of dm-crypt's."""
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    waiting = [node.resolve()] if node.exists() else []
    while waiting:
        node = waiting.pop()
        uuid = node / "dm" / "uuid"
        if uuid.exists() and uuid.read_text().startswith("CRYPT-"):
            return True
        waiting += [each.resolve() for each in node.glob("slaves/*")]
    return False


def check_isolation(context: DoctorContext) -> Iterable[Finding]:
    from falaj.drivers.sandbox import gaps_of, probe

    return isolation.report(
        probe(), users=_count_users(context), gaps=gaps_of, prefer=context.config.isolation
    )


def check_parsing(context: DoctorContext) -> Iterable[Finding]:
    """Where uploaded files are parsed."""
    with closing(open_parsers(context.home, context.config)) as parsers:
        isolation_name = parsers.isolation
    what = "uploaded files are parsed in a process of their own, without keys and environment"
    if isolation_name in isolation.SEPARATING:
        yield ok("parsing", f"{what}, in {isolation_name}")
    else:
        words = f"{what}, but with the platform's own rights: no sandbox works here"
        yield warn("parsing", words, fix="see isolation")


def check_limits(context: DoctorContext) -> Iterable[Finding]:
    """What holds jobs to their share of the machine."""
    from falaj.drivers.processes.limits.enforcement import describe_enforcement

    is_exact, words = describe_enforcement(context.config.node.cgroup)
    if is_exact:
        yield ok("limits", words)
    else:
        fix = "run the platform as a service with Delegate=yes and DelegateSubgroup=platform, or set node.cgroup"
        yield warn("limits", words, fix=fix)


def _count_users(context: DoctorContext) -> int:
    """How many people use this home; one where nobody can say."""
    from falaj.drivers.sql.database import open_database

    if not context.has_database:
        return 1
    try:
        database = open_database(drivers.metadata_url(context.home, context.config))
        try:
            with database.read() as tx:
                return count_users(tx)
        finally:
            database.close()
    except Exception:
        return 1  # the check of the metadata says what is wrong with it


def check_platform(context: DoctorContext) -> Iterable[Finding]:
    home, server = context.home, context.config.server
    if context.is_made and home.is_held():
        url = home.platform().get("url")
        yield ok("platform", f"one runs at {url}" if url else "another process holds the home")
        return
    yield ok("platform", "none runs on this home; falaj up starts one")
    try:
        with socket.socket(socket.AF_INET6 if ":" in server.bind else socket.AF_INET) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((server.bind, server.port))
        yield ok("port", f"{server.bind}:{server.port} is free")
    except OSError as error:
        words = f"{server.bind}:{server.port} cannot be used: {error.strerror}"
        if (
            error.errno == errno.EADDRINUSE
            and "port" not in server.model_fields_set
            and is_loopback(server.bind)
        ):
            yield ok("port", f"{words}; falaj up chooses the next that is free")
        else:
            yield fail("port", words, fix="falaj up --port 0 takes one that is free, or set server.port")


def check_clock(context: DoctorContext) -> Iterable[Finding]:
    now = time.time()
    shown = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(now))
    newest = context.home.database.stat().st_mtime if context.home.database.exists() else 0.0
    if now < LONG_AGO:
        yield fail("clock", f"it says {shown}: it was never set", fix="set the clock, best by NTP")
    elif newest > now + SKEW_S:
        yield fail("clock", f"it says {shown}, before the last write to the database", fix="set the clock")
    else:
        yield ok("clock", shown)


def check_extras(context: DoctorContext) -> Iterable[Finding]:
    needed = {"hsm"} if isinstance(context.config.keys, Pkcs11Config) else set()
    needed |= {"kubernetes"} if context.config.kubernetes is not None else set()
    packages = {extra: next(iter(modules.values())) for extra, modules in EXTRAS.items()}
    found = {extra: _installed(package) for extra, package in packages.items()}
    for extra in sorted(needed):
        if found[extra] is None:
            words = f"{packages[extra]} is not installed, and falaj.toml needs it"
            yield fail(f"extra {extra}", words, fix=f"pip install 'falaj[{extra}]'")
    there = [f"{extra} ({packages[extra]} {number})" for extra, number in found.items() if number]
    missing = [extra for extra, number in found.items() if number is None]
    yield ok("extras", f"{', '.join(there) or 'none'}; not installed: {', '.join(missing) or 'none'}")


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
