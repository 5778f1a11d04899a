"""Check the file of an online store: `python -m falaj.drivers.lmdb.check FILE` exits with 0 if it is sound.

It runs in a process of its own, because LMDB may crash on a damaged file.
"""

from __future__ import annotations

import sys
from pathlib import Path

from falaj.drivers.lmdb.online import LmdbOnlineStore
from falaj.errors import FalajError


def main(path: str) -> int:
    try:
        store = LmdbOnlineStore(Path(path))
        store.check()
    except FalajError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
