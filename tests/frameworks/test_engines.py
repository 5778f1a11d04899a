"""Engines and conversions whose packages are too large for the environment of development."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np

from falaj.records.registry import FileFormat
from falaj.records.serving.endpoints import ServedFile
from falaj.serving.runtime.loading import open_model
from model_servers import mlp
from virtualenvs import ROOT, environment

OPENVINO = """
import json, sys
from pathlib import Path
import numpy as np, onnxruntime as ort
from falaj.errors import InvalidInput
from falaj.records.serving.endpoints import ServedFile
from falaj.serving.runtime.engines.openvino import open_model
from falaj.serving.runtime.engines.opened import ModelContents, probed

file, content = ServedFile(model="m", version="1"), Path(sys.argv[1]).read_bytes()
engine = probed(file, open_model(file, ModelContents(content)))
rows = np.random.default_rng(0).standard_normal((300, 32)).astype(np.float32)
wanted = ort.InferenceSession(content).run(None, {"x": rows})[0]
found = [float(np.abs(engine.run([rows[:count]])[0] - wanted[:count]).max()) for count in (1, 7, 300)]
try:
    open_model(file, ModelContents(content[: len(content) // 2]))
except InvalidInput as error:
    words = str(error)
names = [tensor.name for tensor in (*engine.model.inputs, *engine.model.outputs)]
print(json.dumps([max(found), names, words]))
"""

CATBOOST = """
import json, sys
import catboost, numpy as np
from falaj.errors import InvalidInput
from falaj.optimization.runtime.export import export_onnx

rows = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
rows[::7, 2] = np.nan
classes = np.array(["a", "b", "c"])[np.digitize(rows[:, 0], [-0.5, 0.5])]
made = []
for kind, target in (
    (catboost.CatBoostClassifier, (rows[:, 0] > 0).astype(int)),
    (catboost.CatBoostClassifier, classes),
    (catboost.CatBoostRegressor, rows[:, 0]),
):
    model = kind(iterations=5, verbose=0, allow_writing_files=False).fit(rows, target)
    exported = export_onnx(model, sys.argv[1], sample=rows)
    made.append([exported.outputs[0].name, exported.outputs[0].shape[1], exported.max_difference])
texts = np.array([["a", 1.0], ["b", 2.0]] * 20, object)
model = catboost.CatBoostClassifier(iterations=2, verbose=0, cat_features=[0], allow_writing_files=False)
try:
    export_onnx(model.fit(texts, [0, 1] * 20), sys.argv[1] + ".no", sample=np.ones((2, 2)))
except InvalidInput as error:
    made.append(error.message)
print(json.dumps(made))
"""

TENSORFLOW = """
import sys
import numpy as np, tensorflow as tf

class Dense(tf.Module):
    def __init__(self):
        self.weight = tf.Variable(np.arange(8, dtype=np.float32).reshape(4, 2))

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")])
    def serve(self, x):
        return {"y": x @ self.weight + 1.0}

module = Dense()
tf.saved_model.save(module, sys.argv[1], signatures=module.serve)
made = tf.lite.TFLiteConverter.from_saved_model(sys.argv[1]).convert()
open(sys.argv[2], "wb").write(made)
"""


def run_in(name: str, script: str, *words: object) -> str:
    python = environment(name) / "bin" / "python"
    done = subprocess.run(
        [python, "-c", script, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def test_openvino_answers_as_onnx_runtime_does(tmp_path: Path) -> None:
    difference, names, words = json.loads(run_in("engines", OPENVINO, mlp(tmp_path / "m.onnx")))

    assert difference < 1e-5
    assert names == ["x", "y"]
    assert "m@1 is not an ONNX model that can be opened" in words


def test_catboost_models_are_converted_and_checked(tmp_path: Path) -> None:
    binary, several, regression, words = json.loads(run_in("engines", CATBOOST, tmp_path / "m.onnx"))

    assert [made[:2] for made in (binary, several, regression)] == [
        ["probability", 1],
        ["probabilities", 3],
        ["prediction", 1],
    ]
    assert max(made[2] for made in (binary, several, regression)) < 1e-5
    assert "nothing was written" in words
    assert not (tmp_path / "m.onnx.no").exists()


def test_a_tensorflow_model_is_served_by_litert(tmp_path: Path) -> None:
    run_in("tensorflow", TENSORFLOW, tmp_path / "saved", tmp_path / "m.tflite")
    rows = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)

    engine = open_model(
        ServedFile(model="m", version="1", format=FileFormat.LITERT), (tmp_path / "m.tflite").read_bytes()
    )
    try:
        (answer,) = engine.run([rows])
    finally:
        engine.close()

    np.testing.assert_allclose(answer, rows @ np.arange(8).reshape(4, 2) + 1, rtol=1e-5, atol=1e-5)
