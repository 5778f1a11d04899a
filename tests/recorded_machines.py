"""Recorded machines: the kernel's files, and NVML's answers, replayed behind pynvml's interface."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from falaj.drivers.machine.gpus import find_cards
from falaj.drivers.machine.inventory import LocalMachine

FOLDER = Path(__file__).parent / "unit/drivers/machine/recordings"
CONSTANTS = ("NVML_DEVICE_MIG_ENABLE", "NVML_P2P_CAPS_INDEX_NVLINK", "NVML_P2P_STATUS_OK")


class NVMLError(Exception):
    """Raised like pynvml's error, with the library's message."""


class ReplayedNvml:
    """pynvml, for one recorded machine; calls that were not recorded are not supported.

    A recording is JSON: `files` by path, and under `nvml` the answer to each call as it is written, with GPUs by name:
    `nvmlDeviceGetUUID(gpu0)`. A structure is {"struct": fields}, bytes {"bytes": text}, a GPU {"handle": name},
    a failure {"error": message}.
    """

    NVMLError = NVMLError

    def __init__(self, recorded: dict[str, Any]) -> None:
        self._calls: dict[str, Any] = recorded["calls"]
        self._constants: dict[str, int] = recorded["constants"]
        self.sessions = 0

    def itself(self) -> ReplayedNvml:
        return self

    def nvmlInit(self) -> None:  # noqa: N802 - its name there
        self._answer("nvmlInit")
        self.sessions += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.sessions -= 1

    def __getattr__(self, name: str) -> Any:
        if name in self._constants:
            return self._constants[name]
        if name.startswith("nvml"):
            return partial(self._answer, name)
        raise AttributeError(name)

    def _answer(self, name: str, *given: Any) -> Any:
        call = f"{name}({', '.join(map(str, given))})"
        if call == "nvmlInit()" and call not in self._calls:
            return None
        assert self.sessions or name == "nvmlInit", f"{call} outside of a session"
        return replay(self._calls.get(call, {"error": "Not Supported"}))


def replay(answer: Any) -> Any:
    match answer:
        case {"error": words}:
            raise NVMLError(words)
        case {"struct": fields}:
            return SimpleNamespace(**{name: replay(value) for name, value in fields.items()})
        case {"bytes": text}:
            return text.encode()
        case {"handle": name}:
            return name
        case _:
            return answer


class Recorder:
    """Forwards calls to the library, and records its answers as the part `nvml` of a recording."""

    def __init__(self, library: Any) -> None:
        self._library, self.NVMLError = library, library.NVMLError
        self._names: dict[int, str] = {}
        self.calls: dict[str, Any] = {}
        self.constants = {name: getattr(library, name) for name in CONSTANTS}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        return partial(self._ask, name, found) if callable(found) else found

    def _ask(self, name: str, function: Callable[..., Any], *given: Any) -> Any:
        call = f"{name}({', '.join(str(self._written(each, name).get('handle', each)) for each in given)})"
        try:
            answer = function(*given)
        except self.NVMLError as error:
            self.calls[call] = {"error": str(error)}
            raise
        if name not in ("nvmlInit", "nvmlShutdown"):
            written = self._written(answer, name)
            self.calls[call] = written.get("plain", written)
        return answer

    def _written(self, value: Any, name: str) -> dict[str, Any]:
        if isinstance(value, ctypes._Pointer):
            address = ctypes.cast(value, ctypes.c_void_p).value or 0
            kind = "slice" if "MigDeviceHandleByIndex" in name else "gpu"
            number = sum(each.startswith(kind) for each in self._names.values())
            return {"handle": self._names.setdefault(address, f"{kind}{number}")}
        if isinstance(value, ctypes.Structure):
            fields = [field[0] for field in value._fields_]
            return {"struct": {each: self._plain(getattr(value, each)) for each in fields}}
        return {"plain": self._plain(value)}

    def _plain(self, value: Any) -> Any:
        if isinstance(value, bytes):
            return {"bytes": value.decode()}
        return list(value) if isinstance(value, tuple) else value


def recording(name: str) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return recorded


def unpack(recorded: dict[str, Any], root: Path) -> Path:
    """Write the recorded files under a folder that stands for the root of the machine."""
    for name, text in recorded["files"].items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def machine(name: str, root: Path) -> LocalMachine:
    """Return the recorded machine, behind the driver for real ones."""
    recorded = recording(name)
    unpack(recorded, root)
    return LocalMachine(
        root=root,
        name=name,
        usable_cpus=recorded["usable_cpus"],
        cards=partial(find_cards, root=root, load=lambda: ReplayedNvml(recorded["nvml"])),
        mps_directory=root / "tmp/nvidia-mps",
    )
