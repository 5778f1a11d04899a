"""What `falaj doctor` looks at: the machine, the home, and what falaj.toml names. It changes nothing that is there."""

from __future__ import annotations

from pathlib import Path

from falaj.assembly.config import read_config
from falaj.assembly.doctor import cluster, hardware, machine, state
from falaj.assembly.doctor.findings import Check, DoctorContext, failures, guarded, ok
from falaj.assembly.home import Home
from falaj.errors import FalajError
from falaj.records.config import Config
from falaj.records.doctor import Finding
from falaj.records.places import default_config_dir, default_home

CHECKS: dict[str, Check] = {
    "home": state.check_home,
    "keys": state.check_keys,
    "metadata": state.check_metadata,
    "stores": state.check_stores,
    "audit": state.check_audit,
    "zones": state.check_zones,
    "policies": state.check_policies,
    "encryption": machine.check_encryption,
    "isolation": machine.check_isolation,
    "parsing": machine.check_parsing,
    "hardware": hardware.check_hardware,
    "limits": machine.check_limits,
    "platform": machine.check_platform,
    "clock": machine.check_clock,
    "extras": machine.check_extras,
    "cluster": cluster.check_cluster,
}


def examine(path: Path | None = None) -> list[Finding]:
    """Every check of this machine and of the home at `path` (FALAJ_HOME, or .falaj)."""
    home = _home((path or default_home()).absolute())
    config, about_config = _read_config(home)
    context = DoctorContext(home, config)
    findings = [machine.check_python(), *about_config]
    for name, check in CHECKS.items():
        findings += guarded(name, check, context)
    return findings


def _home(path: Path) -> Home:
    """The home at `path` as it is; unlike `open_home`, this makes nothing."""
    try:
        ident = (path / "id").read_text().strip()
    except OSError:
        ident = ""
    return Home(path, default_config_dir().absolute(), ident)


def _read_config(home: Home) -> tuple[Config, list[Finding]]:
    """The configuration, or the defaults where it cannot be read; and what is wrong with it."""
    if not home.toml.exists():
        return Config(), [ok("config", f"there is no {home.toml}; the defaults hold")]
    try:
        return read_config(home.toml), [ok("config", f"{home.toml} is valid")]
    except (FalajError, OSError, UnicodeDecodeError) as error:
        return Config(), failures("config", error)
