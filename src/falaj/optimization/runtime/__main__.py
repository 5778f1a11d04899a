"""`python -m falaj.optimization.runtime SETTINGS FEATURE…`: the command of an optimization job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from falaj.errors import FalajError
from falaj.optimization.runtime.job import optimize
from falaj.optimization.settings import parse_settings


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 on success, 1 with the reason on standard error."""
    inputs = Path(os.environ.get("FALAJ_INPUTS") or "inputs")
    outputs = Path(os.environ.get("FALAJ_OUTPUTS") or "outputs")
    try:
        optimize(parse_settings(arguments), inputs=inputs, outputs=outputs, log=_log)
    except FalajError as error:
        print(f"error[{error.code}] {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _log(message: str) -> None:
    print(message, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
