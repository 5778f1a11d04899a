"""Runs one node of an attempt in its pod: the command of the worker image.

    python -P -m falaj.drivers.kubernetes.worker

The environment says where the platform is, which attempt and node this is, and in which pod (`pods.environment`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from falaj.drivers.kubernetes.worker.node import WorkerNode
from falaj.training.runtime.agent.protocol import SECRET_VARIABLE
from falaj.training.runtime.errors import TrainingError

REFUSED = 78
"""The exit code of a worker that the platform does not let run: another pod has its node, or the attempt is over."""


def main() -> int:
    file = os.environ.pop("FALAJ_AGENT_SECRET_FILE", None)
    if file is not None:
        os.environ[SECRET_VARIABLE] = Path(file).read_text().strip()
    try:
        return WorkerNode.from_environment().run()
    except TrainingError as error:
        print(f"falaj: {error.message}", file=sys.stderr, flush=True)
        return REFUSED


if __name__ == "__main__":
    sys.exit(main())
