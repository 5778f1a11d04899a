"""The peer MLServer: the same ONNX session as a custom runtime; `mlserver start FOLDER` finds it by its settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class OnnxRuntime(MLModel):
    async def load(self) -> bool:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(
            self.settings.parameters.uri, options, providers=["CPUExecutionProvider"]
        )
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = NumpyCodec.decode_input(payload.inputs[0]).astype(np.float32)
        (scores,) = self._session.run(None, {"x": rows})
        output = NumpyCodec.encode_output("y", scores)
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=[output])


def write_settings(folder: Path, model: str, port: int) -> None:
    """Write what `mlserver start` reads: one process, no metrics, on `port`."""
    server = {"host": "127.0.0.1", "http_port": port, "grpc_port": port + 1, "metrics_port": port + 2}
    quiet = {"parallel_workers": 0, "debug": False, "metrics_endpoint": None, "use_structured_logging": False}
    (folder / "settings.json").write_text(json.dumps(server | quiet))
    settings = {"name": "a", "implementation": "mlserver_runtime.OnnxRuntime", "parameters": {"uri": model}}
    (folder / "model-settings.json").write_text(json.dumps(settings))
    (folder / "mlserver_runtime.py").write_text(Path(__file__).read_text())


if __name__ == "__main__":
    write_settings(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
