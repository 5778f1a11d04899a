"""Samples and losses after 20 kills of a random rank at random moments, resumed with 1, 2 and 4 processes.

A model with dropout and augmented samples, on CPU with gloo; the rest of a gang is killed when one process has died.
Two runs: `exact=True`, resumed on 1, 2 and 4 processes in turn, and plain `ddp`, resumed on 2. A fifth of the kills
come at any time from the first fork on, the others shortly after a random step; every other step has a checkpoint.

The samples are recorded by each process, not read from the ledger. Losses of all attempts are compared with those of an
uninterrupted run, and the difference is shown beside that of plain ddp on one process and on two.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by the first optimizer
from torch import Tensor, nn

from falaj.training.runtime.checkpointing.certificate import Certificate, verify_certificate
from falaj.training.runtime.fit import fit
from harness import Result, Rule, free_port, report, say

KILLS = 20
PROCESSES = {"exact": (1, 2, 4), "ddp": (2,)}
SAMPLES, BATCH_SIZE, EPOCHS = 93, 16, 240  # six steps an epoch, the last one shorter: 1,440 in all
FEATURES = 8
STEPS_AN_ATTEMPT = 14
EARLY = 0.2  # of the kills are timed from the fork
EARLY_S = 2.0
LATE_S = 0.03
PATIENCE_S = 120


# ------------------------------------------------------------------------------------- one process of a run


class Rows:
    """Samples with augmentation; the first column is the number of the sample."""

    def __init__(self) -> None:
        self._rows = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self._rows[index] + 0.1 * torch.randn(FEATURES)
        return torch.cat([torch.tensor([float(index)]), row]), row.sum().reshape(1)


class Observed(nn.Module):
    """Records the samples that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1)
        )
        self.seen: list[int] = []

    def forward(self, rows: Tensor) -> Tensor:
        self.seen += rows[:, 0].int().tolist()
        output: Tensor = self.layers(rows[:, 1:])
        return output


class StepRecorder:
    """Writes each step of this process with its loss and samples; a kill -9 loses nothing of it."""

    def __init__(self, path: Path, model: Observed) -> None:
        self._file, self._model = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), model

    def on_start(self, step: int, total: int) -> None:
        self._model.seen.clear()
        self._write({"from": step})

    def on_step(self, step: int, loss: float) -> None:
        self._write({"step": step, "loss": loss, "samples": self._model.seen})
        self._model.seen.clear()

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, (json.dumps(line) + "\n").encode())


def train(way: str, run: Path, diary: Path, rank: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(
        rank
    )  # each process begins with another model: that of rank 0 counts, and later that of the checkpoint
    model = Observed()
    fit(
        model,
        nn.functional.mse_loss,
        Rows(),
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        schedule="cosine",
        clip=1.0,
        exact=way == "exact",
        parallel="ddp",
        accumulate=8,
        checkpoint_every=2,
        callbacks=[StepRecorder(diary, model)],
        seed=3,
        device="cpu",
        tune="off",
        workers=0,
        run=run,
    )


# ------------------------------------------------------------------------------------------------- a gang


@dataclass(frozen=True)
class Attempt:
    """One attempt: what its processes recorded, and where it began."""

    processes: int
    began: int | None
    steps: dict[int, list[dict[str, Any]]]
    """For each step, the records of the processes that completed it."""


class Gang:
    """The processes of one attempt."""

    def __init__(self, way: str, run: Path, processes: int, number: int) -> None:
        place = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.diaries = [run.with_name(f"{run.name}-{number}-{rank}.jsonl") for rank in range(processes)]
        self.log = run.with_name(f"{run.name}.log")
        self.pids = [self._fork(way, run, rank, place if processes > 1 else {}) for rank in range(processes)]

    def _fork(self, way: str, run: Path, rank: int, place: dict[str, str]) -> int:
        """Fork a process; forks share the import of torch, which takes longer than the rest."""
        if pid := os.fork():
            return pid
        status = 1
        try:
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ |= place | ({"RANK": str(rank)} if place else {})
            train(way, run, self.diaries[rank], rank)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def kill(self, rank: int) -> None:
        """Kill one process with SIGKILL, and the rest when it is dead."""
        os.kill(self.pids[rank], signal.SIGKILL)
        pid, status = os.waitpid(self.pids[rank], 0)
        rest = [each for each in self.pids if each != pid]
        for each in rest:
            os.kill(each, signal.SIGKILL)
        for each in rest:
            os.waitpid(each, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            sys.exit(f"the process had ended before it was killed, see below\n{self.log.read_text()[-3000:]}")

    def end(self) -> None:
        """Wait until the run has ended."""
        for pid in self.pids:
            if status := os.waitpid(pid, 0)[1]:
                sys.exit(f"a process ended with {status}\n{self.log.read_text()[-3000:]}")

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(read_lines(self.diaries[0])) <= count:
            if time.monotonic() > deadline:
                sys.exit(f"no step within {PATIENCE_S} s\n{self.log.read_text()[-3000:]}")
            time.sleep(0.001)

    def attempt(self) -> Attempt:
        steps: dict[int, list[dict[str, Any]]] = {}
        began = None
        for path in self.diaries:
            for line in read_lines(path):
                began = line.get("from", began)
                if "step" in line:
                    steps.setdefault(line["step"], []).append(line)
        return Attempt(len(self.pids), began, steps)


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


# -------------------------------------------------------------------------------------------------- kills


@dataclass(frozen=True)
class Account:
    """The outcome of a run that was killed repeatedly."""

    lost: int
    repeated: int
    difference: float
    """The largest difference between a loss, of any attempt, and that of the uninterrupted run."""
    certificate: Certificate | None


def disturbed(way: str, folder: Path, rng: random.Random) -> list[Attempt]:
    """Return the attempts of a run that is killed at random moments, and finally left to complete."""
    turns = PROCESSES[way]
    attempts = []
    for number in range(KILLS + 1):
        processes, before = turns[number % len(turns)], unfinished(folder / way)
        gang = Gang(way, folder / way, processes, number)
        if number < KILLS:
            kill_at_random(gang, rng)
        else:
            gang.end()
        attempts.append(gang.attempt())
        report_kill(number, attempts[-1], inside=bool(unfinished(folder / way) - before))
    return attempts


def kill_at_random(gang: Gang, rng: random.Random) -> None:
    if rng.random() < EARLY:
        time.sleep(rng.uniform(0, EARLY_S))
    else:
        gang.wait_for_steps(rng.randrange(1, STEPS_AN_ATTEMPT))
        time.sleep(rng.uniform(0, LATE_S))
    gang.kill(rng.randrange(len(gang.pids)))


def report_kill(number: int, attempt: Attempt, *, inside: bool) -> None:
    went = (
        "before its first step"
        if not attempt.steps
        else f"steps {min(attempt.steps)} to {max(attempt.steps)}"
    )
    end = "ended" if number == KILLS else f"killed{', inside a checkpoint' if inside else ''}"
    say(f"  {number + 1:>2}. {attempt.processes} process(es): {went}, {end}")


def unfinished(run: Path) -> set[str]:
    """Return the checkpoints that were begun and not committed."""
    checkpoints = run / "checkpoints"
    names = {path.name for path in checkpoints.iterdir()} if checkpoints.exists() else set()
    return {name for name in names if name.startswith(".")}


def account(way: str, run: Path, attempts: list[Attempt], undisturbed: Attempt) -> Account:
    counted = counted_samples(attempts)
    per_epoch = -(-SAMPLES // BATCH_SIZE)
    lost = repeated = 0
    for epoch in range(EPOCHS):
        found = Counter[int]()
        for step in range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1):
            found.update(counted.get(step, []))
        lost += sum(1 for sample in range(SAMPLES) if not found[sample])
        repeated += sum(count - 1 for count in found.values() if count > 1)
    difference = max(largest_difference(attempt, undisturbed) for attempt in attempts)
    certificate = None
    if way == "exact":
        certificate = verify_certificate(
            run / "certificate.json",
            samples=SAMPLES,
            batch_size=BATCH_SIZE,
            seed=3,
            steps=EPOCHS * per_epoch,
            run=run,
        )
    return Account(lost, repeated, difference, certificate)


def largest_difference(attempt: Attempt, undisturbed: Attempt) -> float:
    """Return the largest difference between losses of the same steps, over all processes."""
    right = {step: lines[0]["loss"] for step, lines in undisturbed.steps.items()}
    found = (abs(line["loss"] - right[step]) for step, lines in attempt.steps.items() for line in lines)
    return max(found, default=0.0)


def counted_samples(attempts: list[Attempt]) -> dict[int, list[int]]:
    """Return the samples of each step, from the attempt that contributed to the result."""
    begun = [attempt for attempt in attempts if attempt.began is not None]
    counted = {}
    for attempt, after in zip(begun, [*begun[1:], None], strict=True):
        end = after.began if after is not None and after.began is not None else sys.maxsize
        for step, lines in attempt.steps.items():
            if step <= end:
                counted[step] = [sample for line in lines for sample in line["samples"]]
    return counted


def undisturbed(way: str, processes: int, folder: Path) -> Attempt:
    gang = Gang(way, folder / f"{way}-undisturbed-{processes}", processes, 0)
    gang.end()
    return gang.attempt()


def main() -> None:
    first = int(sys.argv[1]) if len(sys.argv) > 1 else random.randrange(10**9)
    say(
        f"moments drawn from {first}; the machine's load is {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    rng, results = random.Random(first), []
    folder = Path(tempfile.mkdtemp(prefix="resume-"))
    try:
        one, two = (undisturbed("ddp", processes, folder) for processes in (1, 2))
        apart = largest_difference(one, two)
        for way, turns in PROCESSES.items():
            named = f"{way}, {KILLS} kills, on {', '.join(map(str, turns))} process(es)"
            say(named)
            alone = two if way == "ddp" else undisturbed(way, turns[0], folder)
            found = account(way, folder / way, disturbed(way, folder, rng), alone)
            show(way, found)
            results += claims(named, found, apart)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report("resume", results)


def claims(named: str, found: Account, apart: float) -> list[Result]:
    seen = f"(peer: all that an undisturbed run sees): {named}"
    difference = f"largest difference of a loss (peer: undisturbed ddp, one process beside two): {named}"
    figures = [
        (f"samples lost {seen}", found.lost, EPOCHS * SAMPLES),
        (f"samples repeated {seen}", found.repeated, EPOCHS * SAMPLES),
        (difference, found.difference, apart),
    ]
    return [Result(what, ours, peer, goal=0, rule=Rule.FALAJ_AT_MOST) for what, ours, peer in figures]


def show(way: str, found: Account) -> None:
    say(
        f"  {way}: {found.lost} samples lost, {found.repeated} repeated, largest difference {found.difference!r}"
    )
    if (c := found.certificate) is not None:
        again = f"{c.compared} losses computed again, {c.largest_difference!r} apart"
        say(
            f"  certificate: exact={c.exact}, {len(c.kill_points)} kill points, {again}, ledger {c.ledger[:16]}…"
        )


if __name__ == "__main__":
    main()
