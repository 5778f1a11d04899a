"""The manifest of a checkpoint: JSON with a digest, all values that are not tensors, and the places of tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from falaj.training.runtime.agent.agents import Agent
from falaj.training.runtime.checkpointing.restore import TensorInfo
from falaj.training.runtime.checkpointing.state import Number
from falaj.training.runtime.checkpointing.storage.parts import PartSummary, StoredChunk
from falaj.training.runtime.checkpointing.storage.store import SaveId
from falaj.training.runtime.errors import CheckpointDamaged
from falaj.training.runtime.step.parameter_groups import dtype_name

FORMAT = 2
_OPENING, _MIDDLE = b'{"sha256": "', b'", "checkpoint": '
_BODY_AT = len(_OPENING) + 64 + len(_MIDDLE)


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint."""

    save_id: SaveId
    run: Mapping[str, Any]
    """Position, facts and optimizer of the run, equal in all processes."""
    numbers: Mapping[str, Number]
    """Values of the optimizer's state that are not tensors."""
    shared: Mapping[str, str]
    """Names of tensors that are stored under another name."""
    tensor_infos: Mapping[str, TensorInfo]
    """Dtype and shape of the stored tensors."""
    parts: tuple[PartSummary, ...]
    pieces: tuple[StoredChunk, ...]

    @property
    def all_tensor_infos(self) -> dict[str, TensorInfo]:
        """Dtype and shape under all names of the tensors."""
        return {
            **self.tensor_infos,
            **{name: self.tensor_infos[first] for name, first in self.shared.items()},
        }


def encode_manifest(manifest: Manifest) -> bytes:
    body = {
        "format": FORMAT,
        "step": manifest.save_id.step,
        "save": manifest.save_id.save,
        "run": manifest.run,
        "numbers": manifest.numbers,
        "shared": manifest.shared,
        "tensors": {
            name: [dtype_name(kind.dtype), kind.shape] for name, kind in manifest.tensor_infos.items()
        },
        "parts": [[part.size_bytes, part.head_bytes, part.head_sha256] for part in manifest.parts],
        "pieces": [
            [each.tensor, each.offsets, each.sizes, each.part, each.at, each.size_bytes, each.sha256]
            for each in manifest.pieces
        ],
    }
    text = json.dumps(body).encode()
    return _OPENING + sha256(text).hexdigest().encode() + _MIDDLE + text + b"}"


def decode_manifest(data: bytes, *, step: int) -> Manifest:
    """Return the manifest in `data`; raise CheckpointDamaged if it is truncated, altered or of another step."""
    text = data[_BODY_AT:-1]
    expected = _OPENING + sha256(text).hexdigest().encode() + _MIDDLE
    if data[:_BODY_AT] != expected or data[-1:] != b"}":
        raise CheckpointDamaged("its manifest is truncated or altered")
    try:
        body = json.loads(text)
        if body["format"] != FORMAT or body["step"] != step:
            raise CheckpointDamaged(f"its manifest is of format {body['format']}, step {body['step']}")
        return _manifest(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointDamaged(f"its manifest is invalid: {error!r}") from error


def saved_runs(agent: Agent) -> Iterator[Mapping[str, Any]]:
    """Yield the run sections of the valid manifests that `agent` stores, newest first; tensors are not read."""
    with closing(agent.checkpoints()) as store:
        for step in store.steps():
            with suppress(CheckpointDamaged):
                yield decode_manifest(store.load_manifest(step), step=step).run


def _manifest(body: Mapping[str, Any]) -> Manifest:
    return Manifest(
        save_id=SaveId(body["step"], body["save"]),
        run=body["run"],
        numbers=body["numbers"],
        shared=body["shared"],
        tensor_infos={
            name: TensorInfo(_dtype(word), tuple(shape)) for name, (word, shape) in body["tensors"].items()
        },
        parts=tuple(PartSummary(*part) for part in body["parts"]),
        pieces=tuple(_pieces(body["pieces"])),
    )


def _pieces(rows: Iterable[list[Any]]) -> Iterable[StoredChunk]:
    for tensor, offsets, sizes, *rest in rows:
        yield StoredChunk(tensor, tuple(offsets), tuple(sizes), *rest)


def _dtype(word: str) -> torch.dtype:
    found = getattr(torch, word)
    if not isinstance(found, torch.dtype):
        raise CheckpointDamaged(f"its manifest names the type {word!r}")
    return found
