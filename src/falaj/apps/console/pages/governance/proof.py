"""One audit entry with its proofs: that it is in the log, and that the log only grew since."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from falaj.apps.console.components.states import BAD, GOOD, command_line, fact, state_badge
from falaj.apps.console.components.texts import plain_text
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.governance.tabs import ENTRY, draw_tabs, panel
from falaj.apps.console.times import Times
from falaj.errors import NotFound
from falaj.governance.audit.verify import canonical, leaf_hash, node_hash, verify_growth, verify_proof
from falaj.records.governance.audit import AuditEntry, ConsistencyProof, InclusionProof, PublicKey
from falaj.sdk.platform import Platform


@dataclass(frozen=True)
class ProofStep:
    """One fold of the path: the sibling, on which side it stands, and the node that both make."""

    sibling: str
    side: str
    node: str


@dataclass(frozen=True)
class EntryView:
    """The entry, the folded inclusion proof, and the consistency proof; `problems` are empty where all holds."""

    seq: int
    facts: tuple[tuple[str, str], ...]
    document: str
    leaf: str
    steps: tuple[ProofStep, ...]
    root: str
    head: tuple[tuple[str, str], ...]
    inclusion: tuple[str, ...]
    problems: tuple[str, ...]
    growth: tuple[str, ...]
    growth_path: tuple[str, ...]
    growth_problems: tuple[str, ...]


def entry_view(proof: InclusionProof, growth: ConsistencyProof, key: PublicKey, *, times: Times) -> EntryView:
    """Return what is shown of an entry. The proofs are checked here, by the code of the offline verifier."""
    public = bytes.fromhex(key.ed25519)
    included = verify_proof(proof.model_dump(mode="json"), public)
    grew = verify_growth(growth.model_dump(mode="json"), public)
    leaf = leaf_hash(canonical(proof.entry))
    head = proof.head
    return EntryView(
        seq=proof.index,
        facts=_facts(proof.entry, times),
        document=json.dumps(proof.entry, indent=2, ensure_ascii=False, sort_keys=True),
        leaf=leaf.hex(),
        steps=fold_steps(leaf, proof.index, proof.size, [bytes.fromhex(each) for each in proof.path]),
        root=head.root,
        head=(
            ("Log", head.log_id),
            ("Entries", f"{head.size:,}"),
            ("Signed at", head.at),
            ("Key", head.key),
            ("Signature", head.signature),
        ),
        inclusion=tuple(included.notes),
        problems=tuple(included.problems),
        growth=tuple(grew.notes),
        growth_path=growth.path,
        growth_problems=tuple(grew.problems),
    )


def fold_steps(leaf: bytes, index: int, size: int, path: list[bytes]) -> tuple[ProofStep, ...]:
    """Return how the path is folded from the leaf to the root (RFC 9162, 2.1.3.2)."""
    node, place, last = leaf, index, size - 1
    steps = []
    for sibling in path:
        if place & 1 or place == last:
            node = node_hash(sibling, node)
            side = "left"
            while not place & 1 and place:
                place, last = place >> 1, last >> 1
        else:
            node, side = node_hash(node, sibling), "right"
        steps.append(ProofStep(sibling.hex(), side, node.hex()))
        place, last = place >> 1, last >> 1
    return tuple(steps)


def _facts(document: dict[str, Any], times: Times) -> tuple[tuple[str, str], ...]:
    entry = AuditEntry.model_validate(document)
    found = {
        "At": times.moment(entry.at),
        "Caller": entry.caller,
        "Action": entry.action,
        "Outcome": entry.outcome,
        "Objects": ", ".join(entry.objects),
        "Rule": entry.rule,
        "Error": entry.error or "",
        "From": entry.origin,
        "Calls": f"{entry.count:,} until {times.moment(entry.until)}" if entry.count > 1 else "",
        "Input (HMAC)": entry.input,
    }
    return tuple((name, value) for name, value in found.items() if value)


# ------------------------------------------------------------------------------------------- drawing


def read_entry(p: Platform, seq: int, times: Times) -> EntryView:
    """Ask for both proofs and the key that checks them."""
    return entry_view(
        p.audit.inclusion_proof(seq), p.audit.consistency_proof(seq + 1), p.audit.key(), times=times
    )


def draw_entry(view: EntryView) -> None:
    with panel("Entry"), ui.element("dl").classes("facts"):
        for name, value in view.facts:
            fact(name, value)
    with panel("Inclusion proof").props("data-part=inclusion"):
        _verdict("is in the log", view.problems)
        for sentence in (*view.inclusion, *view.problems):
            ui.label(sentence).classes("wrap")
        ui.label(
            "The hash of the entry is folded with those of its siblings, up to the signed root."
        ).classes("muted")
        with ui.element("dl").classes("facts spaced"):
            fact("Entry's hash", view.leaf, mono=True)
            for number, step in enumerate(view.steps, 1):
                fact(f"{number}. {step.side}", step.sibling, mono=True)
            fact("Folded", view.steps[-1].node if view.steps else view.leaf, mono=True)
            fact("Signed root", view.root, mono=True)
            for name, value in view.head:
                fact(name, value, mono=True)
    with panel("Consistency proof").props("data-part=consistency"):
        _verdict("the log only grew", view.growth_problems)
        for sentence in (*view.growth, *view.growth_problems):
            ui.label(sentence).classes("wrap")
        with ui.element("dl").classes("facts spaced"):
            for number, each in enumerate(view.growth_path, 1):
                fact(f"{number}.", each, mono=True)
    with panel("Check it elsewhere"):
        ui.label("This page is part of the platform. An auditor checks the same on another machine:").classes(
            "muted"
        )
        command_line(f"falaj --json audit inclusion-proof {view.seq} > proof.json")
        command_line("falaj audit verify proof.json --public-key key.json")
    with ui.expansion("The entry as it is hashed").classes("full spaced"):
        plain_text(view.document)


def _verdict(words: str, problems: tuple[str, ...]) -> None:
    state_badge("DAMAGED" if problems else words, tone=BAD if problems else GOOD)


async def draw(context: PageContext) -> None:
    """Draw the page: an entry that is not there is an error of the whole page."""
    draw_tabs(context, "audit")
    ui.link("Audit log", context.href(ENTRY, "audit")).classes("small")
    given = context.params["seq"]
    if not (given.isascii() and given.isdecimal() and len(given) < 18):
        raise NotFound(f"there is no entry {given!r}")
    view = await context.ask(lambda p: read_entry(p, int(given), context.times))
    ui.label(f"Entry {view.seq:,}").classes("title").props("role=heading aria-level=2")
    draw_entry(view)


PAGE = ConsolePage(
    "/w/{workspace}/governance/audit/{seq}",
    "Audit entry",
    draw,
    entry=ENTRY,
    reads=("audit.inclusion_proof", "audit.consistency_proof", "audit.key"),
)
