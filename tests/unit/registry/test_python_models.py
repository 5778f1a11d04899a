"""Python source as a model: recognized without running it, refused unless it parses and has a signature."""

from __future__ import annotations

import pytest

from falaj.errors import InvalidInput
from falaj.records.registry import FileFormat, TensorSpec
from falaj.registry.file_formats.range_reader import RangeReader
from falaj.registry.formats import model_format, recognize, require_signature

PREDICTS = b"def predict(inputs):\n    return inputs\n"
TENSOR = TensorSpec(name="x", dtype="float32", shape=(-1, 2))


def found(data: bytes, path: str = "model.py") -> FileFormat:
    return recognize(RangeReader(path, len(data), lambda start, size: data[start : start + size]))


@pytest.mark.parametrize(
    ("data", "path", "kind"),
    [
        (PREDICTS, "model.py", FileFormat.PYTHON),
        (PREDICTS, "code/model.py", FileFormat.PYTHON),
        (b"class Model:\n    def predict(self, inputs): ...\n", "model.py", FileFormat.PYTHON),
        (PREDICTS, "train.py", FileFormat.TEXT),
        (b"class Model: pass\n", "model.py", FileFormat.TEXT),
        (b"if True:\n    def predict(inputs): ...\n", "model.py", FileFormat.TEXT),
    ],
)
def test_source_is_recognized_by_its_name_and_what_it_defines(
    data: bytes, path: str, kind: FileFormat
) -> None:
    assert found(data, path) is kind


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"def predict(:\n", "not Python: line 1"),
        (b"x = '\xff'\n", "not UTF-8"),
        (b"x = 1\0\n", "cannot be parsed|not Python"),
        (b"(" * 100_000, "cannot be parsed|not Python"),
        (b"#" * (2 << 20), "more than 1 MiB"),
    ],
    ids=["syntax", "bytes", "null", "deep", "large"],
)
def test_what_is_not_python_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        found(data)

    assert any(each in str(refused.value) for each in words.split("|"))


def test_nothing_of_it_is_run() -> None:
    assert found(b"raise SystemExit(3)\n" + PREDICTS) is FileFormat.PYTHON


def test_the_other_files_of_its_version_may_be_models() -> None:
    given = [FileFormat.PYTHON, FileFormat.SAFETENSORS, FileFormat.ONNX, FileFormat.JSON]

    assert model_format(given) is FileFormat.PYTHON


def test_it_needs_a_signature_with_shapes() -> None:
    require_signature(FileFormat.PYTHON, [TENSOR], [TENSOR])
    require_signature(FileFormat.ONNX, [], [])

    for inputs, outputs in (
        ([], [TENSOR]),
        ([TENSOR], []),
        ([TENSOR], [TensorSpec(name="y", dtype="float32")]),
    ):
        with pytest.raises(InvalidInput, match="needs a signature"):
            require_signature(FileFormat.PYTHON, inputs, outputs)
