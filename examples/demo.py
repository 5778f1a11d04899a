"""The demonstration: what the foundation does, on a platform that this script starts and stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

import falaj as fj
from falaj.governance.audit.verify import verify_export

TOML = """\
[zones.local]
jurisdiction = "AE"
default = true

[zones.frankfurt]
jurisdiction = "DE"
"""

console = Console(highlight=False)
figures: list[tuple[str, str]] = []


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="falaj-demo-") as folder, running(Path(folder)) as url:
        platform = fj.connect(url)
        owner = platform.user.whoami().principal.name
        step("You are its administrator", f"fj.connect({url!r}).user.whoami()")
        say(f"{owner}, with roles {', '.join(sorted({g.role for g in platform.user.whoami().grants}))}")
        people(platform, url)
        residency(platform)
        lineage(platform)
        work(platform)
        evidence(platform, Path(folder))
        erasure(platform)
        platform.close()
    closing_table()


def people(platform: fj.Platform, url: str) -> None:
    step("A second person, with a role in one workspace", "falaj workspace grant risk sara --role viewer")
    platform.workspace.create("risk")
    platform.user.create("sara")
    platform.workspace.grant("risk", "sara", role="viewer")
    issued = platform.token.issue(user="sara", purpose="demo", workspace="risk")
    with fj.connect(url, issued.secret) as sara:
        refused(lambda: sara.blob.upload(iter([b"x"]), workspace="risk"))
        refused(lambda: sara.workspace.show("default"))
    began = time.perf_counter()
    platform.token.revoke(issued.token.id)
    with fj.connect(url, issued.secret) as sara:
        while allowed(sara.user.whoami):
            time.sleep(0.01)
    figure("a revoked token was felt after", f"{(time.perf_counter() - began) * 1000:.0f} ms")


def residency(platform: fj.Platform) -> None:
    step(
        "Data that may not leave the country",
        "falaj blob put patients.csv patients --only AE --class personal",
    )
    platform.put("patients", b"name,age\nA,31\n", workspace="risk", only=("AE",), classes=("personal",))
    platform.put("features", b"31\n", workspace="risk", sources=("risk/blob:patients",))
    platform.put("weights", b"\x00" * 1000, workspace="risk", sources=("risk/blob:features",))
    say("its label flowed to the weights: " + platform.blob.show("risk/weights").label.describe())
    refused(lambda: platform.blob.copy("risk/weights", "frankfurt", name="abroad"))


def lineage(platform: fj.Platform) -> None:
    step("Where do the weights come from?", "falaj lineage show risk/blob:weights --direction up")
    for node in platform.lineage.graph("risk/blob:weights", direction="up"):
        console.print(f"      {'  ' * -node.depth}{node.kind} [bold]{node.name}[/]")


def work(platform: fj.Platform) -> None:
    step(
        "Long work is durable: a copy, done by the controller",
        "falaj blob copy risk/weights local --name twin",
    )
    asked = platform.blob.copy("risk/weights", "local", name="twin")
    for now in platform.work.watch(asked.id):
        say(f"{now.state}{f', {now.doing}' if now.doing else ''}")


def evidence(platform: fj.Platform, folder: Path) -> None:
    step("The evidence, checked offline with the public key alone", "falaj audit export log.jsonl")
    lines = [line.model_dump_json(exclude_none=True) for line in platform.audit.export()]
    public = bytes.fromhex(platform.audit.key().ed25519)
    began = time.perf_counter()
    report = verify_export(lines, public)
    figure(
        "audit entries checked offline", f"{report.entries} in {(time.perf_counter() - began) * 1000:.0f} ms"
    )
    say(f"sound: {report.ok}, {report.entries} entries under {report.heads} signed heads")
    place, entry = next((n, json.loads(t)) for n, t in enumerate(lines) if '"outcome":"denied"' in t)
    entry["entry"]["outcome"] = "done"
    lines[place] = json.dumps(entry)
    say(f"with one denial rewritten: {verify_export(lines, public).problems[0]}")


def erasure(platform: fj.Platform) -> None:
    step("Erasure: the workspace's key is destroyed", "falaj keys destroy risk")
    gone = platform.keys.destroy("risk")
    say(f"{gone.blobs} blobs can no longer be read by anyone")
    refused(lambda: platform.get("risk/patients"))


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """A platform of its own, started as a user would: falaj up."""
    home = folder / "home"
    home.mkdir()
    (home / "falaj.toml").write_text(TOML)
    os.environ["FALAJ_CONFIG_DIR"] = str(folder / "config")
    command = [sys.executable, "-m", "falaj", "--home", str(home), "up", "--port", "0"]
    step("Start the platform: API and controller under one parent", "falaj up")
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            say(process.stdout.readline().strip().replace(str(folder), "…"))
            url = json.loads((home / "run.json").read_text())["url"]
            with fj.connect(url) as platform:
                while platform.platform.status().controller is None:
                    time.sleep(0.02)
            figure("falaj up to ready, on a new home", f"{time.perf_counter() - began:.1f} s")
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def step(title: str, command: str) -> None:
    console.print(f"\n[bold cyan]●[/] [bold]{title}[/]\n    [dim]{command}[/]")


def say(words: str) -> None:
    console.print(f"    {words}", markup=False)


def refused(call: Callable[[], object]) -> None:
    try:
        call()
    except fj.FalajError as error:
        for line in f"refused [{error.code}] {error}".splitlines():
            say(line)
    else:
        raise SystemExit("this should have been refused")


def allowed(call: Callable[[], object]) -> bool:
    try:
        call()
    except fj.FalajError:
        return False
    return True


def figure(what: str, value: str) -> None:
    figures.append((what, value))


def closing_table() -> None:
    table = Table(title="\nWhat was measured on this machine", show_header=False)
    for row in figures:
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
