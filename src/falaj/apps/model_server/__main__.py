"""The process of the model server: serves the endpoints of the home in FALAJ_HOME until it is stopped."""

from __future__ import annotations

import os
import sys

from falaj.apps.logs import log_to
from falaj.apps.model_server.process import announce, run, serve, tune_interpreter, wait_for_stop
from falaj.apps.model_server.server import listen
from falaj.assembly.home import open_home
from falaj.assembly.model_server import publish_local_socket
from falaj.assembly.platform import assemble


def main() -> None:
    """Serve on the bind address and port given as arguments by the parent."""
    os.umask(0o077)
    home = open_home()
    log_to(home.logs / "models.jsonl")
    bind, port = sys.argv[1], int(sys.argv[2])
    platform = assemble(home)
    try:
        try:
            listener = listen(bind, port, tls=platform.config.tls_of_serving)
        except OSError as error:
            sys.exit(
                f"error: the model server cannot listen on {bind}:{port} ({error.strerror}); set serving.port"
            )
        with publish_local_socket(home) as inner:
            run(lambda: serve(platform, listener, inner, ready=_on_ready, until=wait_for_stop))
    finally:
        platform.close()
    os._exit(0)  # everything is flushed; skips noisy teardown warnings of datasketches


def _on_ready(url: str) -> None:
    tune_interpreter()
    announce(url)


if __name__ == "__main__":
    main()
