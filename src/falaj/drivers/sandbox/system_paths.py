"""The parts of the machine that every job may read: programs, libraries, settings and Python."""

from __future__ import annotations

import sys
from pathlib import Path

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Not all of /etc/ssl: it holds private keys too.
SETTINGS = (
    "/etc/alternatives",
    "/etc/group",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/pki/ca-trust/extracted",
    "/etc/pki/tls/certs",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
)
NETWORK_SETTINGS = ("/etc/hosts", "/etc/resolv.conf")


def python_folders() -> list[Path]:
    """Where this Python lives, under the names it goes by, unless the system's folders hold it already."""
    named = {Path(prefix) for prefix in (sys.prefix, sys.base_prefix)}
    named |= {path.resolve() for path in named}
    held = [Path(path) for path in SYSTEM]
    return sorted(
        path for path in named if path != Path("/") and not any(path.is_relative_to(h) for h in held)
    )
