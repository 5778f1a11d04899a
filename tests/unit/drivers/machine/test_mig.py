"""GPUs are cut by nvidia-smi, whose answers are replayed; a card that cannot be cut is put back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from falaj.drivers.machine.mig import NvidiaSmi, ToolAnswer
from falaj.errors import Unavailable
from falaj.records.scheduling.hardware import GpuCard

CARD = GpuCard(id="GPU-1", index=0, model="NVIDIA H200", memory_bytes=150_754_820_096)
OTHER = CARD.model_copy(update={"id": "GPU-2", "index": 1})
SEVEN = tuple(("1g.18gb", start) for start in range(7))
HALVES = (("3g.71gb", 0), ("3g.71gb", 4))


class ReplayedTool:
    """nvidia-smi for two H200: it keeps modes and slices, and answers in the words of the tool.

    `refuses` are arguments that it fails at, once each; `needs_reset` makes changes of the mode wait.
    """

    def __init__(self, *, refuses: Sequence[str] = (), needs_reset: bool = False) -> None:
        self.modes = {"GPU-1": "Disabled", "GPU-2": "Disabled"}
        self.slices: dict[str, list[str]] = {"GPU-1": [], "GPU-2": []}
        self.refuses, self.needs_reset = list(refuses), needs_reset
        self.calls: list[str] = []

    def __call__(self, arguments: Sequence[str]) -> ToolAnswer:
        self.calls.append(" ".join(arguments))
        for each in self.refuses:
            if each in self.calls[-1]:
                self.refuses.remove(each)
                return ToolAnswer(4, "Unable to create a GPU instance: Insufficient Permissions")
        card = arguments[arguments.index("-i") + 1]
        match [each for each in arguments if each not in ("-i", card)]:
            case ["--query-gpu=mig.mode.current", "--format=csv,noheader"]:
                return ToolAnswer(0, f"{self.modes[card]}\n")
            case ["-mig", mode]:
                if self.needs_reset:
                    return ToolAnswer(
                        0, "Warning: MIG mode is in pending enable state for GPU 00000000:41:00.0"
                    )
                self.modes[card] = "Enabled" if mode == "1" else "Disabled"
                return ToolAnswer(0, "Enabled MIG Mode for GPU 00000000:41:00.0\nAll done.")
            case ["mig", "-dci" | "-dgi" as what]:
                if not self.slices[card]:
                    return ToolAnswer(6, "No GPU instances found: Not Found")
                self.slices[card] = [] if what == "-dgi" else self.slices[card]
                return ToolAnswer(0, "Successfully destroyed")
            case ["mig", "-cgi", wanted, "-C"]:
                assert self.modes[card] == "Enabled"
                self.slices[card] += wanted.split(",")
                return ToolAnswer(
                    0, "Successfully created GPU instance ID 9 on GPU 0 using profile MIG 1g.18gb"
                )
        raise AssertionError(arguments)


def test_a_card_is_cut_at_the_places_of_the_layout_and_made_whole_again() -> None:
    tool = ReplayedTool()

    NvidiaSmi(tool).cut({CARD: SEVEN}, before={CARD: ()})
    assert tool.modes["GPU-1"] == "Enabled"
    assert tool.slices["GPU-1"] == [f"1g.18gb:{start}" for start in range(7)]

    NvidiaSmi(tool).cut({CARD: HALVES}, before={CARD: SEVEN})
    assert tool.slices["GPU-1"] == ["3g.71gb:0", "3g.71gb:4"]

    NvidiaSmi(tool).cut({CARD: ()}, before={CARD: HALVES})
    assert (tool.modes["GPU-1"], tool.slices["GPU-1"]) == ("Disabled", [])
    assert not [call for call in tool.calls if "GPU-2" in call]


def test_what_failed_is_put_back_with_what_was_cut_before() -> None:
    tool = ReplayedTool(refuses=["GPU-2 -cgi"])
    NvidiaSmi(tool).cut({CARD: HALVES}, before={CARD: ()})

    with pytest.raises(
        Unavailable, match=r"exit code 4: .*Insufficient Permissions; the layouts are as before"
    ):
        NvidiaSmi(tool).cut({CARD: SEVEN, OTHER: SEVEN}, before={CARD: HALVES, OTHER: ()})

    assert tool.slices == {"GPU-1": ["3g.71gb:0", "3g.71gb:4"], "GPU-2": []}
    assert tool.modes == {"GPU-1": "Enabled", "GPU-2": "Disabled"}


def test_what_cannot_be_put_back_is_said() -> None:
    tool = ReplayedTool(refuses=["-cgi 1g", "-cgi 3g.71gb:0,3g"])
    tool.modes["GPU-1"], tool.slices["GPU-1"] = "Enabled", ["3g.71gb:0", "3g.71gb:4"]

    with pytest.raises(Unavailable, match=r"; not restored: nvidia-smi mig -i GPU-1 -cgi 3g"):
        NvidiaSmi(tool).cut({CARD: SEVEN}, before={CARD: HALVES})


def test_a_gpu_that_needs_a_reset_is_named() -> None:
    with pytest.raises(Unavailable, match=r"GPU 0 switches MIG only after a reset.*--gpu-reset -i 0"):
        NvidiaSmi(ReplayedTool(needs_reset=True)).cut({CARD: SEVEN}, before={CARD: ()})
