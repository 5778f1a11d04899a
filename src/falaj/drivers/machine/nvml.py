"""NVIDIA's management library (NVML): sessions, and queries that may be unsupported."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Load = Callable[[], Any]


def load() -> Any:
    return importlib.import_module("pynvml")


@contextmanager
def session(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def query(nvml: Any, question: str, *of: Any) -> Any:
    """Return the result of an NVML function; none if the card, the driver or the library does not support it."""
    try:
        return getattr(nvml, question)(*of)
    except (nvml.NVMLError, AttributeError):
        return None


def to_text(given: str | bytes | None) -> str:
    """Return text: older releases of the library return bytes."""
    return given.decode(errors="replace") if isinstance(given, bytes) else given or ""


def pci_address(text: str) -> str:
    """Return a PCI address as the kernel writes it: four digits of the domain, in lower case."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"
