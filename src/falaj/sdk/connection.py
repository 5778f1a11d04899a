"""`fj.connect`: a platform by its address, or the one that runs on the home of this folder."""

from __future__ import annotations

import os

from falaj.errors import Unavailable
from falaj.sdk import remote
from falaj.sdk.platform import Platform


def connect(url: str | None = None, token: str | None = None) -> Platform:
    """Connect to the platform at `url`; by default at FALAJ_URL, else to the one that runs on the home.

    The default token is FALAJ_TOKEN or the saved one; FALAJ_CA names a CA file. The home is FALAJ_HOME, or .falaj here
    or above.
    """
    return remote.connect(url or os.environ.get("FALAJ_URL") or _running(), token)


def _running() -> str:
    from falaj.assembly.home import find_home  # an address needs no home
    from falaj.records.places import default_home

    path = default_home()
    home = find_home(path)
    url = None if home is None else home.platform().get("url")
    if url is None:
        raise Unavailable(f"no platform runs on {path.absolute()}; start it with 'falaj up', or name a URL")
    return str(url)
