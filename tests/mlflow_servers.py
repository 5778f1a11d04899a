"""An HTTP server that answers as MLflow's REST API does, or as a test wants it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

API = "/api/2.0/mlflow"
Answer = Callable[[dict[str, Any]], Any]


@dataclass
class ScriptedMlflow:
    """Answers by path: a document, bytes, or a status. `seen` has what was asked, with the headers."""

    url: str = ""
    answers: dict[str, Answer] = field(default_factory=dict)
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def serve_run(self, **run: Any) -> None:
        """Answer with one experiment and one run."""
        found = {
            "info": {"run_id": "r1", "run_name": "r1", "status": "FINISHED", "start_time": 1790000000000}
        }
        self.answers |= {
            "/version": lambda _: b"3.17.2",
            f"{API}/experiments/search": lambda _: {"experiments": [{"experiment_id": "1", "name": "churn"}]},
            f"{API}/runs/search": lambda _: {"runs": [found | run]},
            f"{API}/artifacts/list": lambda _: {},
        }


@contextmanager
def scripted_mlflow() -> Iterator[ScriptedMlflow]:
    script = ScriptedMlflow()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            self._answer({key: values[0] for key, values in query.items()})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, asked: dict[str, Any]) -> None:
            path = urlsplit(self.path).path
            script.seen.append((path, dict(self.headers)))
            answer = script.answers[path](asked) if path in script.answers else 404
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(answer if isinstance(answer, int) else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        script.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield script
        server.shutdown()
        thread.join()
