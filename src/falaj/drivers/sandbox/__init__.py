"""Starts user code: in bubblewrap, as another uid, or as the platform itself."""

from __future__ import annotations

from falaj.drivers.sandbox.bubblewrap import BubblewrapSandbox
from falaj.drivers.sandbox.facts import probe
from falaj.drivers.sandbox.same_uid import SameUidSandbox
from falaj.drivers.sandbox.uid import UidSandbox
from falaj.ports.sandbox import MachineFacts, Mechanism, Sandbox

__all__ = ["BubblewrapSandbox", "SameUidSandbox", "UidSandbox", "probe", "sandbox_for"]


def sandbox_for(mechanism: Mechanism, facts: MachineFacts) -> Sandbox:
    """The driver of a decided mechanism."""
    if mechanism == "bubblewrap":
        return BubblewrapSandbox(facts)
    if mechanism == "uid":
        return UidSandbox(facts)
    return SameUidSandbox()
