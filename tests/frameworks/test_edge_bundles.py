"""Edge bundles in virtualenvs with their engine and numpy alone: predictions, no network, and tampering."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import falaj as fj
from falaj.records.registry import ModelExport, TensorSpec
from model_servers import constant
from polling import PATIENCE_S
from virtualenvs import environment

X = TensorSpec(name="x", dtype="float32", shape=(-1, 2), features=("calls", "minutes"))
Y = TensorSpec(name="y", dtype="float32", shape=(-1, 1))

LITERT_MODEL = """
import sys
import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

def tensor(name, shape, signature, buffer=0):
    made = schema.TensorT()
    made.name, made.shape, made.shapeSignature, made.buffer = name.encode(), shape, signature, buffer
    made.type = schema.TensorType.FLOAT32
    return made

code = schema.OperatorCodeT()
code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.FULLY_CONNECTED
code.version = 1
weights = schema.BufferT()
weights.data = np.frombuffer(np.array([[2, 3]], np.float32).tobytes(), np.uint8)
layer = schema.OperatorT()
layer.opcodeIndex, layer.inputs, layer.outputs = 0, [0, 1, -1], [2]
layer.builtinOptionsType = schema.BuiltinOptions.FullyConnectedOptions
layer.builtinOptions = schema.FullyConnectedOptionsT()
graph = schema.SubGraphT()
graph.tensors = [tensor("x", [1, 2], [-1, 2]), tensor("w", [1, 2], None, 1), tensor("y", [1, 1], [-1, 1])]
graph.inputs, graph.outputs, graph.operators = [0], [2], [layer]
model = schema.ModelT()
model.version, model.operatorCodes, model.subgraphs = 3, [code], [graph]
model.buffers = [schema.BufferT(), weights]
builder = flatbuffers.Builder(1024)
builder.Finish(model.Pack(builder), b"TFL3")
open(sys.argv[1], "wb").write(bytes(builder.Output()))
"""


class Bundle:
    """An edge bundle, and the Python that runs it; no package of ours is on its path."""

    def __init__(self, folder: Path, python: Path, made: ModelExport) -> None:
        self.folder, self.python, self.made = folder, python, made

    def run(self, *words: str | Path, stdin: str | None = None, **options: object) -> Ran:
        command = [*options.pop("before", ()), self.python, "-I", self.folder / "run.py", *words]  # type: ignore[misc]
        where = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
        return Ran(
            subprocess.run(  # type: ignore[call-overload]
                command,
                input=stdin,
                env=where,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                cwd=options.pop("cwd", "/"),
                **options,
            )
        )


class Ran:
    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.status, self.out, self.err = done.returncode, done.stdout, done.stderr


def make_bundle(folder: Path, model: bytes, path: str, python: Path) -> Bundle:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALAJ_CONFIG_DIR", str(folder / "config"))
        with fj.open(folder / "home") as platform:
            blob = platform.put("file", model)
            platform.models.register("churn", files=(blob.id,), paths=(path,), inputs=(X,), outputs=(Y,))
            made = platform.export("churn@1", folder / "bundle", to="edge")
    return Bundle(folder / "bundle", python, made)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("onnx")
    python = environment("edge-onnx") / "bin" / "python"
    return make_bundle(folder, constant(folder / "m.onnx", 3.0).read_bytes(), "weights/model.onnx", python)


@pytest.fixture
def bundle(original: Bundle, tmp_path: Path) -> Bundle:
    """A copy that a test may damage."""
    shutil.copytree(original.folder, tmp_path / "bundle")
    return Bundle(tmp_path / "bundle", original.python, original.made)


def test_the_virtualenv_has_the_engine_and_not_falaj(bundle: Bundle) -> None:
    tried = "import importlib.util as u; print([n for n in ('falaj', 'cryptography', 'onnxruntime') if u.find_spec(n)])"

    found = subprocess.run([bundle.python, "-I", "-c", tried], capture_output=True, text=True)

    assert found.stdout.strip() == "['onnxruntime']"


def test_rows_from_a_file_from_standard_input_and_to_a_file(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("minutes,calls\n1,2\n3,4\n")
    key = ("--key", bundle.made.fingerprint)

    from_file = bundle.run(*key, "rows.csv", cwd=tmp_path)
    from_stdin = bundle.run(
        *key, "--format", "jsonl", "-", stdin='{"calls": 1, "minutes": 2}\n{"x": [1, 2]}\n'
    )
    to_file = bundle.run(*key, "rows.csv", "--output", "out.csv", cwd=tmp_path)

    assert (from_file.status, from_file.out, from_file.err) == (0, "y\n3.0\n3.0\n", "")
    assert (from_stdin.status, from_stdin.out) == (0, '{"y": 3.0}\n{"y": 3.0}\n')
    assert (to_file.status, to_file.out) == (0, "")
    assert (tmp_path / "out.csv").read_text() == "y\n3.0\n3.0\n"


def test_bad_rows_leave_no_output_file(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("minutes,calls\n" + "1,2\n" * 1000 + "1,x\n")

    ran = bundle.run("rows.csv", "--output", "out.csv", cwd=tmp_path)

    assert ran.status == 1
    assert "rows.csv line 1002, calls" in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "rows.csv"]


def test_it_opens_no_socket(bundle: Bundle, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    before = ("strace", "-f", "-e", "trace=network", "-o", trace)

    ran = bundle.run("--key", bundle.made.fingerprint, "-", stdin="calls,minutes\n1,2\n", before=before)

    assert (ran.status, ran.out) == (0, "y\n3.0\n")
    calls = [line for line in trace.read_text().splitlines() if "(" in line and "+++" not in line]
    assert [line for line in calls if "SIG" not in line] == []


def test_without_a_key_the_signer_is_named_and_a_warning_given(bundle: Bundle, tmp_path: Path) -> None:
    unknown = bundle.run("--verify")
    first, again = (bundle.run("--verify", "--pin", tmp_path / "pin") for _ in range(2))

    assert (unknown.status, bundle.made.fingerprint in unknown.err) == (0, True)
    assert "anybody may have made it" in unknown.err
    assert ("first use" in first.out, "pinned in" in again.out) == (True, True)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def sign_again(folder: Path) -> None:
    """Replace the key: a whole bundle that is sound by itself, made by somebody else."""
    from falaj.drivers.keyfile.keys import KeyFile
    from falaj.governance.encryption.signing_keys import SigningKey
    from falaj.registry.signing.signer import sign_files

    keys = KeyFile.open_or_create(folder.parent / "stranger.json")
    old = hashlib.sha256((folder / "model.pub").read_bytes()).hexdigest()
    (folder / "model.pub").write_text(SigningKey.from_der(keys.ecdsa_keys()[-1]).pem)
    new = hashlib.sha256((folder / "model.pub").read_bytes()).hexdigest()
    (folder / "export.json").write_text((folder / "export.json").read_text().replace(old, new))
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "model.sig"]
    digests = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }
    (folder / "model.sig").write_text(sign_files("churn@1", digests, keys))


def swap_key(folder: Path) -> None:
    """Put another key into the bundle, without its signature."""
    from falaj.drivers.keyfile.keys import KeyFile
    from falaj.governance.encryption.signing_keys import SigningKey

    keys = KeyFile.create(folder.parent / "stranger.json")
    (folder / "model.pub").write_text(SigningKey.from_der(keys.ecdsa_keys()[-1]).pem)


def link_model(folder: Path) -> None:
    model = folder / "files/weights/model.onnx"
    shutil.move(model, folder.parent / "elsewhere.onnx")
    model.symlink_to(folder.parent / "elsewhere.onnx")


TAMPERED: dict[str, tuple[Callable[[Path], object], str]] = {
    "model": (lambda f: flip(f / "files/weights/model.onnx"), "other bytes"),
    "signature.json": (lambda f: flip(f / "signature.json"), "signature.json"),
    "manifest.json": (lambda f: flip(f / "manifest.json"), "manifest.json"),
    "export.json": (lambda f: flip(f / "export.json"), "has not signed"),
    "run.py, by a copy of it": (lambda f: (f / "run.py").write_text("print()"), "run.py"),
    "truncated": (
        lambda f: os.truncate(f / "files/weights/model.onnx", 20),
        "20 bytes instead of",
    ),
    "emptied list": (lambda f: (f / "export.json").write_text("{}"), "has not signed"),
    "no signature": (lambda f: (f / "model.sig").unlink(), "model.sig"),
    "signature": (lambda f: flip(f / "model.sig"), "model.sig"),
    "no key": (lambda f: (f / "model.pub").unlink(), "model.pub"),
    "missing": (lambda f: (f / "requirements.txt").unlink(), "requirements.txt"),
    "extra": (lambda f: (f / "numpy.py").write_text("boom"), "not part of the export"),
    "extra in a folder": (lambda f: (f / "files" / "b.onnx").write_text("x"), "not part of the export"),
    "link": (link_model, "a link"),
    "swapped key": (swap_key, "the key"),
    "signed by another": (sign_again, "the key"),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_tampering_is_refused_before_the_model_is_loaded(bundle: Bundle, how: str) -> None:
    tamper, words = TAMPERED[how]
    trusted = shutil.copy(bundle.folder / "run.py", bundle.folder.parent / "trusted.py")
    tamper(bundle.folder)

    command = [bundle.python, "-I", trusted, "--bundle", bundle.folder, "--key", bundle.made.fingerprint, "-"]
    ran = subprocess.run(command, input="calls,minutes\n1,2\n", capture_output=True, text=True)

    assert (ran.returncode, ran.stdout) == (1, "")
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr


def test_without_a_key_a_bundle_of_somebody_else_is_only_warned_about(bundle: Bundle) -> None:
    """The page says so: hashes and a key of the bundle's own prove that it is whole, and no more."""
    sign_again(bundle.folder)

    ran = bundle.run("--verify")

    assert (ran.status, "NOT CHECKED" in ran.out) == (0, True)


def test_a_signed_list_without_the_fields_of_one_is_refused_in_words(bundle: Bundle) -> None:
    for content in ('{"files": 3}', '{"files": [{}]}', "[]", '{"files": []}'):
        (bundle.folder / "export.json").write_text(content)
        sign_again(bundle.folder)

        ran = bundle.run("--verify")

        assert (ran.status, "Traceback" in ran.err) == (1, False), ran.err


def test_a_folder_that_nobody_may_write_to_is_enough(bundle: Bundle) -> None:
    for path in (bundle.folder, *bundle.folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(bundle.folder.rglob("*"))
    read_only = ("setpriv", "--reuid=65534", "--clear-groups") if os.geteuid() == 0 else ()
    for parent in bundle.folder.parents:  # the folders of tests are closed to others
        if parent.is_relative_to("/tmp") and os.geteuid() == 0:
            parent.chmod(parent.stat().st_mode | 0o055)

    ran = bundle.run("-", stdin="calls,minutes\n1,2\n", before=read_only)

    assert (ran.status, ran.out) == (0, "y\n3.0\n"), ran.err
    assert sorted(bundle.folder.rglob("*")) == before


def test_it_measures_and_says_which_package_is_missing(bundle: Bundle) -> None:
    measured = bundle.run("--bench", "--seconds", "0.1", "--batch", "8")
    without = subprocess.run(
        [sys.executable, "-I", "-S", bundle.folder / "run.py", "--bench"], capture_output=True, text=True
    )

    assert (measured.status, "batch 1: p50" in measured.out, "batch 8: p50" in measured.out) == (
        0,
        True,
        True,
    )
    assert (without.returncode, "pip install onnxruntime" in without.stderr) == (1, True)


def test_litert_runs_from_its_package_alone(tmp_path: Path) -> None:
    python = environment("edge-litert") / "bin" / "python"
    subprocess.run([python, "-c", LITERT_MODEL, tmp_path / "m.tflite"], check=True)

    bundle = make_bundle(tmp_path, (tmp_path / "m.tflite").read_bytes(), "model.tflite", python)
    ran = bundle.run("--key", bundle.made.fingerprint, "-", stdin="calls,minutes\n1,2\n10,20\n")
    flip(bundle.folder / "files/model.tflite")
    refused = bundle.run("--key", bundle.made.fingerprint, "--verify")

    assert (ran.status, ran.out) == (0, "y\n8.0\n80.0\n"), ran.err
    assert (refused.status, "other bytes" in refused.err) == (1, True)
