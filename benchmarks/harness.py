"""Shared parts of the benchmarks: reported results, peers in virtualenvs, and the cost of process trees."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PEERS = HERE / ".venvs"

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------------------------- results


class Rule(StrEnum):
    """The figure that the goal bounds: the ratio falaj / peer, or Falaj's own."""

    RATIO_AT_MOST = "falaj / peer ≤"
    RATIO_AT_LEAST = "falaj / peer ≥"
    FALAJ_AT_MOST = "falaj ≤"
    FALAJ_AT_LEAST = "falaj ≥"


@dataclass(frozen=True)
class Result:
    """One claim: the same work by Falaj and by a peer, and the goal; `what` names the unit."""

    what: str
    falaj: float
    peer: float
    goal: float
    rule: Rule = Rule.RATIO_AT_MOST

    @property
    def ratio(self) -> float:
        return self.falaj / self.peer

    @property
    def met(self) -> bool:
        figure = self.falaj if self.rule in (Rule.FALAJ_AT_MOST, Rule.FALAJ_AT_LEAST) else self.ratio
        at_most = self.rule in (Rule.RATIO_AT_MOST, Rule.FALAJ_AT_MOST)
        return figure <= self.goal if at_most else figure >= self.goal

    def line(self) -> dict[str, object]:
        """Return the line of this claim at the end of a benchmark's output."""
        return {
            "what": self.what,
            "falaj": rounded(self.falaj),
            "peer": rounded(self.peer),
            "ratio": rounded(self.ratio),
            "goal": self.goal,
            "met": self.met,
        }


def report(bench: str, results: Sequence[Result]) -> None:
    """Print `results` as text on stderr and as JSON in the last line of stdout, and store them in results/."""
    show(bench, results)
    RESULTS.mkdir(exist_ok=True)
    kept = {
        "bench": bench,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "results": [{**result.line(), "rule": result.rule.value} for result in results],
    }
    (RESULTS / f"{bench}.json").write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
    last = {"bench": bench, "results": [result.line() for result in results]}
    print(json.dumps(last, ensure_ascii=False), flush=True)


def show(bench: str, results: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", title=bench)
    for heading in ("falaj", "peer", "ratio", "goal"):
        table.add_column(heading, justify="right")
    table.add_column("met")
    for result in results:
        figures = (f"{rounded(figure):g}" for figure in (result.falaj, result.peer, result.ratio))
        table.add_row(result.what, *figures, f"{result.rule} {result.goal:g}", "yes" if result.met else "NO")
    Console(stderr=True).print(table)


def rounded(figure: float) -> float:
    """Round to four significant digits."""
    return float(f"{figure:.4g}")


def machine() -> dict[str, object]:
    """Return what a reader must know of the machine to judge absolute numbers."""
    return {"cpu": cpu_model(), "cores": os.cpu_count(), "python": platform.python_version()}


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def say(message: str) -> None:
    """Print progress to stderr."""
    print(message, file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------- peers


def peer_venv(name: str, requirements: Sequence[str]) -> Path:
    """Return the Python of a virtualenv with `requirements`; made on first use, and again when they change."""
    folder = PEERS / name
    python, stamp = folder / "bin" / "python", folder / ".requirements"
    wanted = "\n".join(requirements)
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    say(f"installing the peer {name}, once: {' '.join(requirements)}")
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *requirements], check=True, stdout=sys.stderr)
    stamp.write_text(wanted)
    return python


def environment(**extra: str) -> dict[str, str]:
    """Return this environment without settings that would slow one side down, such as no bytecode files."""
    unwanted = ("PYTHON", "COVERAGE", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)} | extra


# ----------------------------------------------------------------------------------------- processes


@contextmanager
def running(command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str]) -> Iterator[int]:
    """Yield the id of a process that runs `command`; it and its descendants are ended afterwards."""
    log = cwd / "output.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process.pid
    except BaseException:
        say(log.read_text(errors="replace")[-4000:])
        raise
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], *, patience_s: float = 20) -> None:
    """Terminate `process`, and kill the rest of its tree after `patience_s`."""
    tree = process_tree(process.pid)
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        say(f"{process.args!r} did not end within {patience_s} s")
    deadline = time.monotonic() + patience_s
    while (left := [pid for pid in tree if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    process.wait()


def is_alive(pid: int) -> bool:
    try:
        return stat_fields(pid)[0] not in ("Z", "X")
    except ProcessLookupError:
        return False


def process_tree(root: int) -> list[int]:
    """Return `root` and all its living descendants."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                children[int(stat_fields(int(entry.name))[1])].append(int(entry.name))
            except ProcessLookupError:
                continue
    tree = [root]
    for pid in tree:  # grows during the iteration
        tree.extend(children[pid])
    return tree


def cpu_seconds(root: int) -> float:
    """Return user and system time of `root` and its descendants, with the children that they have waited for."""
    ticks = 0
    for pid in process_tree(root):
        try:
            ticks += sum(int(field) for field in stat_fields(pid)[11:15])
        except ProcessLookupError:
            continue
    return ticks / TICKS_PER_SECOND


def pss_mb(root: int) -> float:
    """Return the PSS memory of `root` and its descendants in MB."""
    return sum(pss_kib(pid) for pid in process_tree(root)) * 1024 / 1e6


def pss_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the command's name: 0 is the state, 1 the parent, 11-14 the times."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None


def settle(root: int, *, within_s: float = 90) -> None:
    """Wait until the tree of `root` is idle: under a tenth of a core for two seconds in a row."""
    deadline = time.monotonic() + within_s
    calm_s = 0
    spent = cpu_seconds(root)
    while calm_s < 2 and time.monotonic() < deadline:
        time.sleep(1)
        before, spent = spent, cpu_seconds(root)
        calm_s = calm_s + 1 if spent - before < 0.1 else 0


# ---------------------------------------------------------------------------------------------- HTTP


def saved_token(config: Path) -> str:
    """Return the token that `falaj up` saved for the owner of its home."""
    (saved,) = json.loads((config / "credentials.json").read_text()).values()
    return str(saved if isinstance(saved, str) else saved["token"])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def get(url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 10) -> int:
    """Return the status of one GET request, without a proxy."""
    request = urllib.request.Request(url, headers=dict(headers or {}))
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=timeout_s) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code


def wait_until_ready(url: str, *, pid: int, within_s: float = 120) -> None:
    """Poll `url` until it answers 200; fail when the process `pid` ends before, or after `within_s`."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not is_alive(pid):
            raise RuntimeError(f"the process ended before {url} answered")
        try:
            if get(url) == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"{url} did not answer 200 within {within_s} s")
