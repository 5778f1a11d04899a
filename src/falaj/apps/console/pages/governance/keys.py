"""Keys: the data keys of workspaces, the root key that wraps them, rotation, and destruction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.actions import action_button
from falaj.apps.console.components.states import command_line, fact
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.governance.tabs import ENTRY, PLATFORM, draw_tabs, panel
from falaj.apps.console.pages.platform_events import follow_platform
from falaj.apps.console.times import Times
from falaj.records.governance.audit import PublicKey
from falaj.records.governance.keys import DataKeyInfo

COLUMNS = (
    TableColumn("workspace", "Workspace"),
    TableColumn("version", "Version", "number"),
    TableColumn("state", "State", "state"),
    TableColumn("root", "Wrapped by", "mono"),
    TableColumn("created", "Created", "time"),
    TableColumn("destroyed", "Destroyed", "time"),
)


@dataclass(frozen=True)
class KeysView:
    rows: tuple[TableRow, ...]
    roots: tuple[str, ...]
    audit: tuple[tuple[str, str], ...]


def keys_view(keys: Sequence[DataKeyInfo], audit: PublicKey, times: Times) -> KeysView:
    """Return what is shown of keys; never a key."""
    return KeysView(
        rows=tuple(_row(each, times) for each in keys),
        roots=tuple(dict.fromkeys(each.root for each in keys if each.destroyed_at is None)),
        audit=(("Log", audit.log_id), ("Key", audit.key), ("Ed25519", audit.ed25519)),
    )


def _row(key: DataKeyInfo, times: Times) -> TableRow:
    cells = {
        "workspace": key.workspace,
        "version": str(key.version),
        "state": "ready" if key.destroyed_at is None else "destroyed",
        "root": key.root,
        "created": times.moment(key.created_at),
        "destroyed": times.moment(key.destroyed_at),
    }
    return TableRow(f"{key.workspace}/{key.version}", cells)


# ------------------------------------------------------------------------------------------- drawing


def draw_keys(view: KeysView) -> None:
    with panel("Data keys of workspaces"):
        data_table(COLUMNS, view.rows, title="Data keys")
        ui.label(f"Root key: {', '.join(view.roots) or 'none'}").classes("muted small wrap")
    with panel("Public key of the audit log"):
        ui.label("Keep it where operators of the platform cannot write: all proofs depend on it.").classes(
            "muted"
        )
        with ui.element("dl").classes("facts"):
            for name, value in view.audit:
                fact(name, value, mono=True)


def draw_key_actions(context: PageContext, may: Collection[str], may_here: Collection[str]) -> None:
    """Draw the buttons of those who may rotate, and of those who may destroy."""
    with ui.element("div").classes("toolbar spaced"):
        action_button(
            context,
            "Rotate the root key",
            "keys.rotate",
            lambda p: p.keys.rotate(),
            may=may,
            done=lambda rotated: f"{rotated.rewrapped} data keys are wrapped by {rotated.root}.",
            confirm="Make a new root key and wrap every data key with it? No blob is rewritten.",
            icon="autorenew",
        )
        action_button(
            context,
            "Rotate the signing key",
            "keys.rotate_signing",
            lambda p: p.keys.rotate_signing(),
            may=may,
            done=lambda rotated: f"Model versions are signed by {rotated.fingerprint} from now on.",
            confirm="Make a new key that signs model versions? Earlier keys verify what they signed.",
            icon="draw",
        )
        if "keys.destroy" in may_here:
            button = ui.button("Destroy the keys of this workspace", icon="delete_forever")
            button.props("outline dense color=negative data-action=keys.destroy")
            button.on_click(lambda: _destroy(context))


async def _destroy(context: PageContext) -> None:
    here = context.workspace
    with context.client.content, ui.dialog() as dialog, ui.card().classes("wide-card"):
        ui.label(f"Destroy the data keys of {here}?").classes("state-title")
        ui.label(
            "Nobody can read its blobs again, backups included: models, datasets, checkpoints, logs. No undo."
        )
        typed = ui.input("Type the name of the workspace").props("outlined dense").classes("full")
        with ui.row():
            button = ui.button("Destroy", on_click=lambda: dialog.submit(True)).props(
                "unelevated color=negative"
            )
            button.bind_enabled_from(typed, "value", lambda value: value == here)
            ui.button("Keep them", on_click=lambda: dialog.submit(False)).props("flat autofocus")
    agreed = await dialog
    is_named = typed.value == here
    dialog.delete()
    if agreed and is_named:
        await context.act(
            lambda p: p.keys.destroy(here), done=lambda gone: f"{gone.blobs:,} blobs cannot be read any more."
        )


async def draw(context: PageContext) -> None:
    """Draw the page."""
    draw_tabs(context, "keys")

    async def load() -> KeysView:
        return await context.ask(lambda p: keys_view(p.keys.list(), p.audit.key(), context.times))

    region = await context.region(load, draw_keys, events=("keys.*", "workspaces.*"))
    follow_platform(context, ("keys.*", "workspaces.*"), region)
    draw_key_actions(context, await context.may(PLATFORM), await context.may())
    command_line("falaj keys list")


PAGE = ConsolePage(
    "/w/{workspace}/governance/keys",
    "Keys",
    draw,
    entry=ENTRY,
    reads=("keys.list", "audit.key"),
    actions=("keys.rotate", "keys.rotate_signing", "keys.destroy"),
)
