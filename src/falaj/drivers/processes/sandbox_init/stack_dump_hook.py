"""Makes a Python process dump its stacks on a signal. Standard library only.

Its source text becomes the sitecustomize of the user's Python processes, by PYTHONPATH, so that scripts and their
children need no change; the user's own sitecustomize runs after it. The signal only appends the stacks of all threads
to a file, even while the process waits in C code.
"""

from __future__ import annotations

import sys


def register() -> None:
    import faulthandler
    import os
    import signal

    folder = os.environ.get("FALAJ_HEARTBEAT", "")
    stacks = os.open(os.path.join(folder, "stacks"), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    faulthandler.register(signal.SIGRTMIN + 11, file=stacks, all_threads=True, chain=False)


def run_user_sitecustomize() -> None:
    """Remove our folder from the path, and run the sitecustomize that would have been found without it."""
    import os

    here = os.path.dirname(__file__)
    sys.path[:] = [path for path in sys.path if path != here]
    for finder in sys.meta_path:
        spec = finder.find_spec("sitecustomize", None)
        if spec is not None and spec.loader is not None:
            from importlib.util import module_from_spec

            sys.modules["sitecustomize"] = module = module_from_spec(spec)
            spec.loader.exec_module(module)
            return


if __name__ == "sitecustomize":
    try:  # noqa: SIM105 - contextlib is not loaded yet
        register()
    except Exception:  # noqa: S110 - the user's code runs, with or without it
        pass
    run_user_sitecustomize()
