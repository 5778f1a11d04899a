"""A platform for the demonstration, started as a user would: falaj up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from stage import figure, say, step

import falaj as fj

T = TypeVar("T")

TOML = """\
[zones.local]
jurisdiction = "AE"
default = true

[zones.frankfurt]
jurisdiction = "DE"

[node]
zone = "local"

[serving]
port = 0

[prices]
currency = "AED"
cpu_hour = 0.15
gpu_hour = 9.0
"""

STOP_S = 60.0
"""The platform is killed if it has not stopped by then."""


def isolation(home: Path) -> str:
    """Return the setting that lets jobs run without isolation: this home is temporary and has a single user."""
    command = [sys.executable, "-m", "falaj", "--home", str(home), "doctor", "--json"]
    found = json.loads(subprocess.run(command, check=False, stdout=subprocess.PIPE).stdout)
    decision = next(each["words"] for each in found if each["check"] == "isolation")
    if not decision.startswith("same-uid"):
        return ""
    say("Nothing on this machine keeps jobs apart from the platform; this home runs them all the same.")
    return 'isolation = "none"\n\n'


def keep_open(folder: Path, url: str) -> None:
    """Show the address of the console with a link to sign in, and wait until the user has seen enough."""
    facts = json.loads((folder / "home" / "run.json").read_text())
    with fj.connect(url) as platform:
        code = platform.tokens.sign_in_link().code
    step("Look around: everything above is in the console")
    say(f"{facts.get('console') or url}/#code={code}")
    say("The link signs in once, within five minutes. docs/reference/console.md describes the pages.")
    say("Ctrl-C stops the platform and removes its home.")
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        signal.pause()


def wait_until(platform: fj.Platform, condition: Callable[[], T]) -> T:
    """Return the first true value of `condition`; exit where a process of the platform keeps failing."""
    while not (value := condition()):
        if failing := platform.platform.status().failing:
            raise SystemExit("; ".join(failing.values()))
        time.sleep(0.1)
    return value


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """Yield the address of a platform that runs in `folder` until the end of the block."""
    home = folder / "home"
    home.mkdir(mode=0o700)
    os.environ["FALAJ_CONFIG_DIR"] = str(folder / "config")
    (home / "falaj.toml").write_text(isolation(home) + TOML)
    command = [sys.executable, "-m", "falaj", "--home", str(home), "up", "--port", "0"]
    step("Start the platform: everything under one parent", "falaj up")
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            say(process.stdout.readline().strip().replace(str(folder), "…"))
            url = json.loads((home / "run.json").read_text())["url"]
            with fj.connect(url) as platform:
                wait_until(platform, lambda: platform.platform.status().controller is not None)
            figure("falaj up to ready, on a new home", f"{time.perf_counter() - began:.1f} s")
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
