"""Truncated and damaged files of every format: a sentence, and never a fault of the server's process."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from falaj.errors import InvalidInput, Unavailable
from falaj.records.registry import FileFormat
from falaj.records.serving.endpoints import ServedFile
from falaj.serving.runtime.engine import ModelEngine
from falaj.serving.runtime.loading import open_model
from framework_models import (
    lightgbm_booster,
    lightgbm_bytes,
    litert_bytes,
    torch_bytes,
    torch_module,
    xgboost_booster,
    xgboost_bytes,
)

SENTENCES = r"is not an? .* that can be opened|cannot be opened within its limits|without its end"


@cache
def content_of(kind: FileFormat) -> bytes:
    if kind is FileFormat.XGBOOST:
        return xgboost_bytes(xgboost_booster())
    if kind is FileFormat.LIGHTGBM:
        return lightgbm_bytes(lightgbm_booster())
    if kind is FileFormat.LITERT:
        return litert_bytes(np.ones((2, 4)), np.ones(2))
    return torch_bytes(torch_module(), torch.randn(3, 4))


FORMATS = [FileFormat.XGBOOST, FileFormat.LIGHTGBM, FileFormat.LITERT, FileFormat.TORCH_EXPORT]


def opened(kind: FileFormat, content: bytes) -> ModelEngine:
    return open_model(ServedFile(model="m", version="1", format=kind), content)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_truncated_file_is_refused_with_a_sentence(kind: FileFormat, share: float) -> None:
    content = content_of(kind)

    with pytest.raises((InvalidInput, Unavailable), match=SENTENCES):
        opened(kind, content[: int(len(content) * share)])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_file_is_refused_or_opened_but_in_its_own_process(kind: FileFormat) -> None:
    """A wrong number in a tree or weight cannot be told from a right one, so some of these open."""
    content = content_of(kind)
    for place in range(len(content) // 3, len(content), len(content) // 3):
        damaged = bytearray(content)
        damaged[place : place + 8] = b"\xff" * 8

        try:
            engine = opened(kind, bytes(damaged))
        except (InvalidInput, Unavailable) as error:
            sentence = str(error)
        else:
            engine.close()
            sentence = f"m@1 opens as {type(engine).__name__}"
        assert sentence.startswith("m@1")
        assert not sentence.endswith("OnnxEngine")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_of_another_format_is_refused(kind: FileFormat) -> None:
    other = FORMATS[(FORMATS.index(kind) + 1) % len(FORMATS)]

    with pytest.raises((InvalidInput, Unavailable), match=SENTENCES):
        opened(kind, content_of(other))
