"""Falaj: one sovereign ML platform, from a laptop to a cluster. `import falaj as fj`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from falaj.version import VERSION

if TYPE_CHECKING:
    from falaj.errors import FalajError
    from falaj.governance.caller import once
    from falaj.sdk.embedded import open_platform as open  # noqa: A004 - fj.open is the public name
    from falaj.sdk.platform import Platform
    from falaj.sdk.remote import connect

__version__ = VERSION

_HOMES = {
    "FalajError": ("falaj.errors", "FalajError"),
    "Platform": ("falaj.sdk.platform", "Platform"),
    "connect": ("falaj.sdk.remote", "connect"),
    "once": ("falaj.governance.caller", "once"),
    "open": ("falaj.sdk.embedded", "open_platform"),
}

__all__ = ["FalajError", "Platform", "__version__", "connect", "once", "open"]


def __getattr__(name: str) -> Any:
    """Public names are loaded when they are first used."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"falaj has no public name {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
