"""One model version: facts, metrics, gates and approvals with their buttons, card, files, variants and lineage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nicegui import events, ui

from falaj.apps.console.components.lineage import LineagePicture, draw_lineage, draw_side, lineage_picture
from falaj.apps.console.components.listing import LISTED, read_all
from falaj.apps.console.components.sections import (
    Cell,
    Crumb,
    chosen_tab,
    facts,
    heading,
    panel,
    small_table,
    tabs,
)
from falaj.apps.console.components.states import command_line, empty_state
from falaj.apps.console.components.texts import safe_markdown
from falaj.apps.console.page import ConsolePage, PageContext
from falaj.apps.console.pages.models.evidence import (
    AliasEvidence,
    EvidenceRecords,
    draw_evidence,
    evidence,
    no_metrics,
)
from falaj.apps.console.pages.models.variants import VariantsView, draw_variants, variants
from falaj.apps.console.times import Times, number, size
from falaj.errors import Denied, NotFound
from falaj.records.governance.lineage import LineageNode
from falaj.records.models.cards import ModelCard, OriginObject
from falaj.records.optimization import Optimization
from falaj.records.registry import Model, ModelVersion, TensorSpec
from falaj.sdk.platform import Platform

TABS = (
    ("overview", "Overview"),
    ("card", "Card"),
    ("files", "Files and signature"),
    ("variants", "Variants"),
    ("lineage", "Lineage"),
)
DEPTH = 8
DEFAULT_ALIAS = "champion"


@dataclass(frozen=True)
class VersionRecords:
    """What the page is made from; the parts of tabs that are not open are empty."""

    version: ModelVersion
    model: Model
    card: ModelCard
    evidence: EvidenceRecords | None = None
    optimizations: Sequence[Optimization] = ()
    nodes: Sequence[LineageNode] = ()


@dataclass(frozen=True)
class ModelVersionView:
    reference: str
    id: str
    model_id: str
    words: str
    about: tuple[tuple[str, str], ...]
    origins: tuple[tuple[str, str, tuple[str, ...]], ...]
    """What it was made from: the role, the name, and the page."""
    metrics: tuple[tuple[str, str, str], ...]
    """Metric, value, and what it was measured on."""
    params: tuple[tuple[str, str], ...]
    missing: str
    aliases: tuple[str, ...]
    tensors: tuple[tuple[str, str, str, str, str], ...]
    files: tuple[tuple[str, str, str, str], ...]
    packages: tuple[tuple[str, str], ...]
    card: str
    evidence: AliasEvidence | None
    variants: VariantsView | None
    lineage: LineagePicture


def version_view(records: VersionRecords, *, person: str, times: Times) -> ModelVersionView:
    """Return what the page shows to the person with the id `person`."""
    version, known = records.version, records.card.facts
    pointing = tuple(each.alias for each in records.model.aliases if each.version == version.reference)
    return ModelVersionView(
        reference=version.reference,
        id=version.id,
        model_id=records.model.id,
        words="model version" + (f", {' and '.join(pointing)} of {version.name}" if pointing else ""),
        about=(
            ("author", known.author),
            ("registered", times.moment(version.created_at)),
            ("format", version.format.value),
            ("size", size(version.size_bytes)),
            ("licence", version.licence or "not stated"),
            ("hardware", (version.hardware and version.hardware.describe()) or "not known"),
            ("zone", version.zone or "default"),
            ("restriction", version.label.describe()),
            ("id", version.id),
        ),
        origins=_origins(records.card),
        metrics=_metrics(records.card),
        params=tuple(sorted(known.params.items())),
        missing=", ".join(each.replace("_", " ") for each in records.card.missing),
        aliases=tuple(dict.fromkeys([*(each.alias for each in records.model.aliases), DEFAULT_ALIAS])),
        tensors=tuple(_tensor("input", each) for each in version.inputs)
        + tuple(_tensor("output", each) for each in version.outputs),
        files=tuple(
            (each.path, each.format.value, size(each.size_bytes), each.sha256) for each in version.files
        ),
        packages=tuple((each.name, each.version) for each in version.packages),
        card=records.card.markdown,
        evidence=None if records.evidence is None else evidence(records.evidence, person=person, times=times),
        variants=variants(records.optimizations, version.reference, times=times),
        lineage=lineage_picture(records.nodes, workspace=version.workspace, times=times),
    )


def _origins(card: ModelCard) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    known = card.facts
    found: list[tuple[str, OriginObject]] = []
    if known.training_set is not None:
        found.append(("training set", known.training_set))
    if known.run is not None:
        found.append(("run", known.run))
    found += [("made from", each) for each in known.sources]
    return tuple((role, each.name or each.id, ("lineage", each.id)) for role, each in found)


def _metrics(card: ModelCard) -> tuple[tuple[str, str, str], ...]:
    own = [(name, number(value), "at registration") for name, value in sorted(card.facts.metrics.items())]
    measured = [
        (name, number(value), f"on {each.on}, by {each.by}")
        for each in card.facts.measurements
        for name, value in sorted(each.metrics.items())
    ]
    return (*own, *measured)


def _tensor(direction: str, spec: TensorSpec) -> tuple[str, str, str, str, str]:
    shape = " × ".join("any" if each < 0 else str(each) for each in spec.shape) or "–"
    return direction, spec.name, spec.dtype, shape, ", ".join(spec.features) or "–"


# ------------------------------------------------------------------------------------------- drawing


class VersionPage:
    """An open page of a version: the tab and the alias that the address names."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self.tab = chosen_tab(context, TABS)
        self.name, self.number = context.params["model"], context.params["version"]
        self.alias = context.query.get("alias", "")
        self.comment = ""
        self.may: frozenset[str] = frozenset()

    async def load(self) -> ModelVersionView:
        """Ask for what the open tab shows."""
        ask, reference = self.context.ask, f"{self.context.workspace}/{self.name}@{self.number}"
        version = await ask(lambda p: p.models.version(reference))
        model, card, may = await asyncio.gather(
            ask(lambda p: p.models.show(version.model)),
            ask(lambda p: p.models.card(version.id)),
            self.context.may(version.id),
        )
        self.may = may
        if not self.alias:
            protected = [each.alias for each in model.aliases if each.protected]
            self.alias = (protected or [each.alias for each in model.aliases] or [DEFAULT_ALIAS])[0]
        found = VersionRecords(version, model, card)
        if self.tab == "overview":
            found = VersionRecords(
                version, model, card, await ask(lambda p: self._evidence(p, version, model))
            )
        elif self.tab == "variants":
            found = VersionRecords(version, model, card, None, await self._optimizations(version))
        elif self.tab == "lineage":
            nodes = await ask(lambda p: [*p.lineage.graph(version.id, depth=DEPTH)])
            found = VersionRecords(version, model, card, nodes=nodes)
        person = self.context.session.identity.principal.id
        return version_view(found, person=person, times=self.context.times)

    def _evidence(self, platform: Platform, version: ModelVersion, model: Model) -> EvidenceRecords:
        alias = self.alias
        known = next((each for each in model.aliases if each.alias == alias), None)
        other = known.version if known is not None and known.version != version.reference else None
        workspace = self.context.workspace
        return EvidenceRecords(
            version=version,
            alias=alias,
            known=known,
            gates=platform.models.check_gates(version.id, alias=alias),
            approvals=platform.models.approvals(version.id, alias=alias).items,
            diff=None if other is None else platform.models.diff(f"{workspace}/{other}", version.id),
        )

    async def _optimizations(self, version: ModelVersion) -> Sequence[Optimization]:
        here = self.context.workspace

        def ask(platform: Platform) -> Sequence[Optimization]:
            found = read_all(
                platform, lambda p, at: p.optimization.list(workspace=here, after=at, limit=LISTED)
            )
            names = (version.reference, version.id)
            mine = [
                each
                for each in found
                if each.model in names or any(row.version in names for row in each.table)
            ]
            return [platform.optimization.show(each.id) for each in mine]

        try:
            return await self.context.ask(ask)
        except (Denied, NotFound):
            return ()

    async def draw(self) -> None:
        self.region = await self.context.region(
            self.load, self.show, events=("models.*", "optimization.*", "endpoints.*", "predictions.*")
        )

    async def refresh(self) -> None:
        await self.region.refresh()

    def show(self, view: ModelVersionView) -> None:
        above = [
            Crumb("Models", self.context.href("models")),
            Crumb(self.name, self.context.href("models", self.name)),
        ]
        heading(view.reference, above=above, words=view.words)
        tabs(self.context, TABS, self.tab)
        parts: dict[str, Callable[[ModelVersionView], None]] = {
            "overview": self._overview,
            "card": self._card,
            "files": self._files,
            "variants": self._variants,
            "lineage": self._lineage,
        }
        with ui.element("div").classes("stack"):
            parts[self.tab](view)

    # ------------------------------------------------------------------------------------------- tabs

    def _overview(self, view: ModelVersionView) -> None:
        if view.evidence is not None:
            self._decision(view, view.evidence)
        with ui.element("div").classes("columns flush"):
            with panel("Facts"):
                facts(view.about, mono=("id",))
                if view.missing:
                    ui.label(f"Missing: {view.missing}.").classes("muted small wrap")
            with panel("Made from"):
                if view.origins:
                    rows = [(role, Cell(name, self.context.href(*page))) for role, name, page in view.origins]
                    small_table(("role", "object"), rows, title="What the version was made from")
                else:
                    ui.label("Neither a training set nor a run is recorded.").classes("muted")
                if view.params:
                    small_table(("parameter", "value"), view.params, title="Parameters of the run")
        with panel("Metrics"):
            if view.metrics:
                measured = [(name, Cell(value, tone="figure"), on) for name, value, on in view.metrics]
                small_table(("metric", "value", "measured"), measured, title="Metrics")
            else:
                no_metrics(view.reference)

    def _decision(self, view: ModelVersionView, found: AliasEvidence) -> None:
        with panel(f"{found.alias}: evidence and decision") as section:
            section.props["data-alias"] = found.alias
            with ui.element("div").classes("toolbar"):
                for alias in view.aliases:
                    link = ui.link(alias, self._here(alias)).classes("choice")
                    if alias == found.alias:
                        link.classes("here").props("aria-current=true")
                ui.input(label="Another alias").props("dense outlined").classes("narrow").on(
                    "keydown.enter", self._choose
                )
            draw_evidence(self.context, found, may=self.may, comment=lambda: self.comment, after=self.refresh)
            if "models.approve" in self.may and not found.approve_blocked:
                field = ui.input(label="Comment kept with your approval", value=self.comment)
                field.props("dense outlined maxlength=2000").classes("full")
                field.on_value_change(self._keep_comment)

    def _choose(self, event: events.GenericEventArguments) -> None:
        sender = event.sender
        if isinstance(sender, ui.input) and str(sender.value or "").strip():
            ui.navigate.to(self._here(str(sender.value).strip()))

    def _keep_comment(self, event: events.ValueChangeEventArguments[Any]) -> None:
        self.comment = str(event.value or "")

    def _here(self, alias: str) -> str:
        return self.context.href("models", self.name, "versions", self.number, alias=alias)

    def _card(self, view: ModelVersionView) -> None:
        with ui.element("section").classes("panel"):
            safe_markdown(without_images(view.card))

    def _files(self, view: ModelVersionView) -> None:
        with panel("Inputs and outputs"):
            if view.tensors:
                heads = ("direction", "name", "type", "shape", "columns")
                small_table(heads, view.tensors, title="Inputs and outputs")
            else:
                ui.label("The version has no signature of its inputs and outputs.").classes("muted")
        with panel("Files"):
            small_table(("file", "format", "size", "SHA-256"), view.files, title="Files")
            command_line(f"falaj models export {view.reference} FOLDER --to files")
        with panel("Bill of materials", note="CycloneDX 1.6: files, data, versions and packages."):
            ui.button("Download", icon="download", on_click=self._download_bom).props("outline dense")
            if view.packages:
                small_table(("package", "version"), view.packages, title="Packages")

    async def _download_bom(self) -> None:
        reference = f"{self.context.workspace}/{self.name}@{self.number}"
        found = await self.context.act(
            lambda p: p.models.bom(reference), done="The bill of materials is downloaded."
        )
        if found is not None:
            content = json.dumps(found.document, indent=2, ensure_ascii=False).encode()
            ui.download.content(
                content, f"{self.name}-{self.number}.cdx.json", "application/vnd.cyclonedx+json"
            )

    def _variants(self, view: ModelVersionView) -> None:
        if view.variants is None:
            empty_state(
                "No variant of this version was measured.",
                command=f"falaj optimization start {view.reference} --target COLUMN",
                icon="speed",
            )
        else:
            draw_variants(self.context, view.variants, self.name)

    def _lineage(self, view: ModelVersionView) -> None:
        note = "From the sources to the predictions; a click on a node opens its page."
        with panel("Graph", note=note):
            draw_lineage(
                self.context, view.lineage, title=f"The lineage of {view.reference}", start=view.reference
            )
            ui.link("Open the lineage page", self.context.href("lineage", view.id))
        with ui.element("div").classes("columns flush"):
            with panel("Made from"):
                draw_side(self.context, view.lineage.upstream)
            with panel("Used by"):
                draw_side(self.context, view.lineage.downstream)


def without_images(markdown: str) -> str:
    """Return Markdown whose images are links: the picture of another host would tell it who looks."""
    return markdown.replace("![", "! [")


async def draw(context: PageContext) -> None:
    """Draw the page."""
    await VersionPage(context).draw()


PAGE = ConsolePage(
    "/w/{workspace}/models/{model}/versions/{version}",
    "Model version",
    draw,
    entry="models",
    reads=(
        "models.version",
        "models.show",
        "models.card",
        "models.check_gates",
        "models.approvals",
        "models.diff",
        "models.bom",
        "optimization.list",
        "optimization.show",
        "lineage.graph",
    ),
    actions=("models.promote", "models.approve"),
)
