"""Starts user code: in bubblewrap, under Landlock, as another uid, or as the platform itself."""

from __future__ import annotations

import sys

from falaj.drivers.sandbox.bubblewrap import BubblewrapSandbox
from falaj.drivers.sandbox.landlock import LandlockSandbox
from falaj.drivers.sandbox.same_uid import SameUidSandbox
from falaj.drivers.sandbox.uid import UidSandbox
from falaj.ports.sandbox import Gap, MachineFacts, Mechanism, Sandbox

__all__ = [
    "BubblewrapSandbox",
    "LandlockSandbox",
    "SameUidSandbox",
    "UidSandbox",
    "gaps_of",
    "probe",
    "sandbox_for",
]


def probe(*, python: str = sys.executable, spare_uids: range | None = None) -> MachineFacts:
    """The facts of this machine, for user code run by `python`; about a tenth of a second."""
    from falaj.drivers.sandbox import facts  # not for those who only start user code: they want to be quick

    return facts.probe(python=python, spare_uids=spare_uids)


def sandbox_for(mechanism: Mechanism, facts: MachineFacts) -> Sandbox:
    """The driver of a decided mechanism."""
    if mechanism == "bubblewrap":
        return BubblewrapSandbox(facts)
    if mechanism == "landlock":
        return LandlockSandbox(facts)
    if mechanism == "uid":
        return UidSandbox(facts)
    return SameUidSandbox()


def gaps_of(mechanism: Mechanism, facts: MachineFacts) -> tuple[Gap, ...]:
    """The promises that a mechanism does not keep on this machine."""
    return sandbox_for(mechanism, facts).gaps
