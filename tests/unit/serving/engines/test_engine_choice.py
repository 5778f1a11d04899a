"""What a format needs and is not installed is one sentence, with the extra that has it."""

from __future__ import annotations

import sys

import pytest

from falaj.errors import InvalidInput, Unavailable
from falaj.records.registry import FileFormat
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.settings import ServingSettings
from falaj.serving.runtime import formats
from falaj.serving.runtime.engines.choice import MODULES, find_opener
from falaj.serving.runtime.formats import PACKAGES, require_installed
from falaj.serving.runtime.loading import open_model


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [
        (FileFormat.LIGHTGBM, "lightgbm", "trees"),
        (FileFormat.XGBOOST, "xgboost", "trees"),
        (FileFormat.LITERT, "ai_edge_litert", "litert"),
        (FileFormat.TORCH_EXPORT, "torch", "torch"),
    ],
)
def test_a_missing_framework_names_the_extra(
    kind: FileFormat, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"falaj.serving.runtime.engines.{MODULES[kind]}", raising=False)
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name == package else name)

    with pytest.raises(
        Unavailable, match=rf"m@1, .*needs the package {package}: pip install 'falaj\[{extra}\]'"
    ):
        find_opener(ServedFile(model="m", version="1", format=kind))
    with pytest.raises(Unavailable, match=rf"needs the package {package}: pip install 'falaj\[{extra}\]'"):
        require_installed([FileFormat.ONNX, kind])


def test_every_served_format_has_an_engine() -> None:
    apart = {FileFormat.ONNX, FileFormat.ENSEMBLE}  # sessions in the server, and engines of other formats

    assert set(PACKAGES) == {*apart, *MODULES}


def test_an_ensemble_is_not_opened_from_a_file_alone() -> None:
    with pytest.raises(
        InvalidInput, match="m@1 is an ensemble, whose steps the platform's model server opens"
    ):
        open_model(ServedFile(model="m", version="1", format=FileFormat.ENSEMBLE), b"{}")


def test_openvino_runs_onnx_alone() -> None:
    settings = ServingSettings(engine="openvino")

    with pytest.raises(InvalidInput, match="OpenVINO runs ONNX models here"):
        find_opener(ServedFile(model="m", version="1", format=FileFormat.XGBOOST, settings=settings))
