"""NVIDIA's management library (NVML): a session with it, and questions that it need not answer."""

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
    """The answer; none where the card, the driver or the release of the library has none."""
    try:
        return getattr(nvml, question)(*of)
    except (nvml.NVMLError, AttributeError):
        return None


def to_text(given: str | bytes | None) -> str:
    """Older releases of the library give bytes."""
    return given.decode(errors="replace") if isinstance(given, bytes) else given or ""


def pci_address(told: str) -> str:
    """NVML writes the domain in eight digits and capitals, the kernel in four and small letters."""
    domain, _, rest = told.lower().partition(":")
    return f"{domain[-4:]}:{rest}"
