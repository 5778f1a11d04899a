"""Texts that people wrote: markdown, and logs or code as they are."""

from __future__ import annotations

import re

import markdown2
from nicegui import ui

MARKDOWN_CHARACTERS = 50_000
"""Longer texts are shown as they are written."""
IMAGE = re.compile("<img [^>]*>")
EXTRAS = ("fenced-code-blocks", "tables", "cuddled-lists", "strike")


def safe_markdown(text: str) -> None:
    """Show markdown of strangers: their HTML is escaped here, and what comes out is sanitized in the browser again."""
    if len(text) > MARKDOWN_CHARACTERS:
        plain_text(text)
        return
    ui.html(markdown_html(text), sanitize=True).classes("prose")


def markdown_html(text: str) -> str:
    """Return markdown as HTML without any HTML of its own, without links that run scripts, and without images: those
    would be asked of other hosts."""
    html = str(markdown2.markdown(text, safe_mode="escape", extras=[*EXTRAS]))
    return IMAGE.sub("", html)


def plain_text(text: str, *, height_px: int | None = None) -> ui.label:
    """Show a text as it is written, with its line breaks."""
    shown = ui.label(text).classes("plain mono")
    return shown if height_px is None else shown.style(f"max-height: {height_px}px; overflow: auto")
