"""The process in which Optuna runs, so that the controller neither imports it nor waits for its computations.

Input and output are lines of JSON: the settings, then commands, each with one answer. It exits when its input is
closed, and has no access to the platform.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from falaj.tuning.runtime.sampling import SampledStudy

NICER = 5
"""Processes of the platform have priority."""
UNUSED = ("sklearn", "redis")
"""Optuna loads these wherever they are installed, which would take most of the time to start."""


def main() -> None:
    os.nice(NICER)
    first = sys.stdin.buffer.readline()
    if not first:
        return
    sys.modules.update(dict.fromkeys(UNUSED))  # type: ignore[arg-type] # an import of them fails
    from falaj.tuning.runtime.sampling import SampledStudy

    given = json.loads(first)
    study = SampledStudy(given["settings"], seed=given["seed"], grid=given["grid"])
    for line in sys.stdin.buffer:
        try:
            answer = perform(study, json.loads(line))
        except Exception:
            answer = {"failed": traceback.format_exc(limit=-5)[-4000:]}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def perform(study: SampledStudy, command: Mapping[str, Any]) -> dict[str, Any]:
    """Perform one command, and return its answer."""
    match command["do"]:
        case "ask":
            number, params = study.ask()
            return {"number": number, "params": params}
        case "replay":
            study.replay(command["number"], command["params"])
            return {}
        case "report":
            found = study.report(command["number"], command["values"], after=command["after"])
            return {"prune": any(found)}
        case "tell":
            study.tell(command["number"], command["state"], command["values"])
            return {}
        case "importance":
            return {"importance": study.importance()}
        case other:
            raise ValueError(f"unknown command {other!r}")


if __name__ == "__main__":
    main()
