"""The command line: `falaj`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that was typed, and exit with its status."""
    try:
        from falaj.apps.cli.app import run

        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
