"""Expired data is removed, and a proof shows that the log only grew."""

from __future__ import annotations

from datetime import timedelta

import pytest

from falaj.control.service import EVENTS_KEPT, KEYS_KEPT
from falaj.errors import NotFound
from falaj.governance.audit.merkle import verify_consistency
from falaj.governance.operations.caller import once
from falaj.governance.tables import events, idempotency, sign_in_codes
from platforms import OwnPlatform


def test_old_keys_events_and_links_are_dropped_and_new_ones_stay(platform: OwnPlatform) -> None:
    with once("old"):
        platform.workspaces.create("before")
    platform.tokens.sign_in_link()
    platform.clock.advance(KEYS_KEPT + timedelta(seconds=1))
    with once("new"):
        platform.workspaces.create("after")

    first = platform.platform.cleanup()
    platform.clock.advance(EVENTS_KEPT + timedelta(seconds=1))
    second = platform.platform.cleanup()

    assert (first.keys, first.links) == (1, 1)
    assert second.events > 0
    assert platform.count(idempotency) == 0
    assert platform.count(sign_in_codes) == 0
    assert platform.count(events) == 1


def test_a_consistency_proof_shows_that_the_log_only_grew(platform: OwnPlatform) -> None:
    for number in range(5):
        platform.workspaces.create(f"w{number}")

    proof = platform.audit.consistency_proof(3)

    path, roots = [bytes.fromhex(each) for each in proof.path], (proof.root, proof.head.root)
    old, new = (bytes.fromhex(root) for root in roots)
    assert verify_consistency(3, proof.head.size, path, old, new)
    assert not verify_consistency(3, proof.head.size, path, new, new)


@pytest.mark.parametrize("since", [0, 10**6])
def test_a_size_outside_the_log_has_no_proof(platform: OwnPlatform, since: int) -> None:
    with pytest.raises(NotFound):
        platform.audit.consistency_proof(since)
