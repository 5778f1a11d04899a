"""Hyperparameters: studies of Falaj, whose trials are jobs, against plain Optuna in one process.

First the search itself: with the same budget over many seeds, three trials at a time as a study has them, the best
value found by Falaj's sampler process (new seeds for each trial, the study built again from its trials in the middle)
against one `optuna.Study` in memory. As good means: a one-sided Mann-Whitney test does not show it to be worse at 5 %.
Then whole studies on a platform: seconds of a trial beyond those of the same script started by Optuna, and CPU seconds
of the platform. Jobs are not its children: the CPU seconds of the script and of its sandbox are not among them, while
those of the peer include its scripts.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
from scipy.stats import mannwhitneyu

import falaj as fj
from falaj.records.tuning import StudySettings, StudyTrial, TrialState
from falaj.tuning.sampler_process import SamplerProcess
from harness import Result, Rule, cpu_seconds, report, say

QUICK = True
BUDGET, SEEDS, PARALLEL = 40, 30, 3
TRIALS = 12

SPACE = {
    "lr": {"type": "float", "low": 1e-5, "high": 1.0, "log": True},
    "momentum": {"type": "float", "low": 0.0, "high": 0.99},
    "layers": {"type": "int", "low": 1, "high": 6},
    "kind": {"type": "choice", "choices": ["adam", "sgd", "lion"]},
}
SCRIPT = """
import argparse, math
import falaj as fj
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--momentum", type=float)
parser.add_argument("--layers", type=int)
parser.add_argument("--kind")
given = vars(parser.parse_args())
loss = (math.log10(given["lr"]) + 2.5) ** 2 / 4 + (given["momentum"] - 0.9) ** 2 * 4
fj.job.log(step=1, loss=loss + abs(given["layers"] - 3) / 5 + {"adam": 0, "sgd": 0.1, "lion": 0.2}[given["kind"]])
"""

Ask = Callable[[], tuple[int, Mapping[str, Any]]]


def loss(given: Mapping[str, Any]) -> float:
    """The loss that the script logs: the surface of a small training."""
    smooth = (math.log10(given["lr"]) + 2.5) ** 2 / 4 + (given["momentum"] - 0.9) ** 2 * 4
    return smooth + abs(given["layers"] - 3) / 5 + {"adam": 0.0, "sgd": 0.1, "lion": 0.2}[given["kind"]]


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    ours = [falaj_best(seed) for seed in range(SEEDS)]
    theirs = [optuna_best(seed) for seed in range(SEEDS)]
    worse = float(mannwhitneyu(ours, theirs, alternative="greater").pvalue)
    for name, found in (("falaj", ours), ("optuna", theirs)):
        quarters = statistics.quantiles(found, n=4)
        say(
            f"{name}: best loss of {BUDGET} trials, quartiles over {SEEDS} seeds: {[round(q, 4) for q in quarters]}"
        )
    platform_s, platform_cpu_s, platform_loss = on_the_platform()
    plain_s, plain_cpu_s, plain_loss = plain_scripts()
    say(f"best loss of {TRIALS} trials with scripts: falaj {platform_loss:.4f}, optuna {plain_loss:.4f}")
    search = f"of the best of {BUDGET} trials, {SEEDS} seeds"
    medians = statistics.median(ours), statistics.median(theirs)
    more_s = platform_s - plain_s
    report(
        "tuning",
        [
            Result(f"p that it is worse than Optuna's, {search}", worse, 1, 0.05, Rule.FALAJ_AT_LEAST),
            Result(f"median loss {search}", *medians, 1.25),
            Result("s a trial beyond its script, one at a time", more_s, plain_s, 2.0, Rule.FALAJ_AT_MOST),
            Result("CPU s of the platform a trial", platform_cpu_s, plain_cpu_s, 1.0, Rule.FALAJ_AT_MOST),
        ],
    )


# -------------------------------------------------------------------------------------------------- the search


def falaj_best(seed: int) -> float:
    """Return the best loss by the process that the controller samples with; it is started anew in the middle."""
    settings = StudySettings.model_validate(
        {"space": SPACE, "objectives": [{"metric": "loss", "direction": "minimize"}], "trials": BUDGET}
    )
    trials: dict[int, StudyTrial] = {}
    events: list[int] = []
    running: list[int] = []
    process = SamplerProcess(settings, seed=seed)
    try:
        while len(trials) < BUDGET or running:
            if len(trials) == BUDGET // 2 and len(running) == PARALLEL:
                process.close()
                process = SamplerProcess(settings, seed=seed)
                process.replay(trials.values(), events)
            while len(running) < PARALLEL and len(trials) < BUDGET:
                number, params = process.ask()
                trials[number] = StudyTrial(number=number, params=params)
                running.append(number)
                events.append(number)
            number = running.pop(0)
            values = (loss(trials[number].params),)
            trials[number] = trials[number].model_copy(
                update={"state": TrialState.COMPLETE, "values": values}
            )
            process.tell(trials[number])
            events.append(-1 - number)
    finally:
        process.close()
    return min(each.values[0] for each in trials.values())


def optuna_best(seed: int) -> float:
    """Return the best loss by plain Optuna, as many trials at a time."""
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    running: list[optuna.Trial] = []
    asked = 0
    while asked < BUDGET or running:
        while len(running) < PARALLEL and asked < BUDGET:
            running.append(study.ask(distributions()))
            asked += 1
        trial = running.pop(0)
        study.tell(trial, loss(trial.params))
    return study.best_value


def distributions() -> dict[str, optuna.distributions.BaseDistribution]:
    from falaj.tuning.runtime.sampling import distribution

    settings = StudySettings.model_validate(
        {"space": SPACE, "objectives": [{"metric": "loss", "direction": "minimize"}]}
    ).model_dump(mode="json")
    return {name: distribution(each) for name, each in settings["space"].items()}


# -------------------------------------------------------------------------------------------------- the overhead


def on_the_platform() -> tuple[float, float, float]:
    """Return seconds and CPU seconds a trial of a study, and its best loss; the start of the platform is left out."""
    with tempfile.TemporaryDirectory(prefix="tuning-") as folder:
        os.environ |= {"FALAJ_CONFIG_DIR": str(Path(folder) / "config")}
        script = write_script(Path(folder))
        with fj.open(Path(folder) / "home") as platform:
            warm = platform.tune(script, space=SPACE, metric="loss", trials=1, name="warm", seed=0)
            for _ in platform.studies.watch(warm.id):
                pass
            began, cpu = time.perf_counter(), own_cpu()
            study = platform.tune(script, space=SPACE, metric="loss", trials=TRIALS, seed=1)
            *_, ended = platform.studies.watch(study.id)
            took, used = time.perf_counter() - began, own_cpu() - cpu
    say(f"a study of {TRIALS} trials, one at a time: {took:.1f} s, {used:.1f} CPU s")
    return took / TRIALS, used / TRIALS, ended.best[0].values[0]


def plain_scripts() -> tuple[float, float, float]:
    """Return the same of plain Optuna that starts the script as a process for each trial."""
    with tempfile.TemporaryDirectory(prefix="tuning-") as folder:
        script = write_script(Path(folder))

        def objective(trial: optuna.Trial) -> float:
            words = [f"--{name}={value}" for name, value in trial.params.items()]
            done = subprocess.run(
                [sys.executable, script, *words], cwd=folder, capture_output=True, text=True, check=True
            )
            return float(done.stderr.rpartition("loss=")[2])

        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
        began, cpu = time.perf_counter(), own_cpu()
        for _ in range(TRIALS):
            trial = study.ask(distributions())
            study.tell(trial, objective(trial))
        took, used = time.perf_counter() - began, own_cpu() - cpu
    say(f"plain Optuna, {TRIALS} scripts: {took:.1f} s, {used:.1f} CPU s")
    return took / TRIALS, used / TRIALS, study.best_value


def write_script(folder: Path) -> Path:
    (folder / "code").mkdir()
    path = folder / "code" / "train.py"
    path.write_text(SCRIPT)
    return path


def own_cpu() -> float:
    """Return the CPU seconds of this process and of its children, those that run and those that have ended."""
    return cpu_seconds(os.getpid())


if __name__ == "__main__":
    main()
