"""Cuts the GPUs of this machine into MIG slices by nvidia-smi."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from falaj.errors import Unavailable, shorten
from falaj.ports.machine.hardware import Places
from falaj.records.scheduling.hardware import GpuCard

TOOL = "nvidia-smi"
TIMEOUT_S = 120.0
NONE_LEFT = re.compile(r"No (GPU|compute) instances found|No MIG-enabled devices found")


class ToolAnswer(NamedTuple):
    """The exit code of the tool, and what it printed."""

    code: int
    text: str


Run = Callable[[Sequence[str]], ToolAnswer]


def run_tool(arguments: Sequence[str]) -> ToolAnswer:
    """Run nvidia-smi."""
    try:
        done = subprocess.run(
            [TOOL, *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{TOOL} {' '.join(arguments)} failed: {error}") from error
    return ToolAnswer(done.returncode, f"{done.stdout} {done.stderr}".strip())


class NvidiaSmi:
    """A MigTool over nvidia-smi, which must run as root."""

    def __init__(self, run: Run = run_tool) -> None:
        self._run = run

    def cut(self, cards: Mapping[GpuCard, Places], *, before: Mapping[GpuCard, Places]) -> None:
        begun: list[GpuCard] = []
        try:
            for card, places in cards.items():
                begun.append(card)
                self._cut(card, places)
        except Unavailable as error:
            left = [fault for card in begun if (fault := self._restore(card, before[card]))]
            outcome = f"; not restored: {'; '.join(left)}" if left else "; the layouts are as before"
            raise Unavailable(error.message + outcome) from error

    def _restore(self, card: GpuCard, places: Places) -> str:
        """Cut a card as it was, and return why that failed; empty if it did not."""
        try:
            self._cut(card, places)
        except Unavailable as error:
            return error.message
        return ""

    def _cut(self, card: GpuCard, places: Places) -> None:
        if self._mode(card) == "Enabled":
            for destroy in ("-dci", "-dgi"):
                self._ask("mig", "-i", card.id, destroy, may_say=NONE_LEFT)
        self._switch(card, "Enabled" if places else "Disabled")
        if places:
            wanted = ",".join(f"{profile}:{start}" for profile, start in places)
            self._ask("mig", "-i", card.id, "-cgi", wanted, "-C")

    def _mode(self, card: GpuCard) -> str:
        return self._ask("-i", card.id, "--query-gpu=mig.mode.current", "--format=csv,noheader").strip()

    def _switch(self, card: GpuCard, wanted: str) -> None:
        """Switch MIG on or off; some GPUs do that only after a reset."""
        if self._mode(card) == wanted:
            return
        self._ask("-i", card.id, "-mig", "1" if wanted == "Enabled" else "0")
        if self._mode(card) != wanted:
            raise Unavailable(
                f"GPU {card.index} switches MIG only after a reset: stop what uses it, and run "
                f"{TOOL} --gpu-reset -i {card.index}"
            )

    def _ask(self, *arguments: str, may_say: re.Pattern[str] | None = None) -> str:
        """Return what the tool printed. Raise Unavailable if it failed, unless it only found nothing to do."""
        code, text = self._run(arguments)
        if code != 0 and not (may_say is not None and may_say.search(text)):
            said = shorten(" ".join(text.split()), limit=500)
            raise Unavailable(f"{TOOL} {' '.join(arguments)} failed with exit code {code}: {said}")
        return text
