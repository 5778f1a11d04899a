"""Seconds to list 100,000 runs and 10,000 models with every interface: Python, REST and the command line.

The server is a real `falaj up`, once on SQLite and once on PostgreSQL. Runs and models are made in bulk, in the tables;
the lists are read by a user with the role viewer, page by page of 1,000, each page authorized and audited.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa

import falaj as fj
from falaj.assembly.home import open_home
from falaj.assembly.platform import LocalPlatform, assemble
from falaj.governance import objects
from falaj.governance.tables import objects as objects_table
from falaj.ports.metadata import Database
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ROOT, new_id
from falaj.registry.tables import alias_changes, aliases, models, versions
from falaj.tracking.tables import runs
from harness import Result, Rule, environment, free_port, report, running, say, wait_until_ready

QUICK = True
RUNS, MODELS = 100_000, 10_000
PAGE = 1000
GOAL_S = 20
URL_VARIABLE = "FALAJ_BENCHMARK_METADATA_URL"
MODEL_PAGE_GOAL_S = 0.5
FALAJ = Path(sys.executable).with_name("falaj")


def main() -> None:
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="listing-") as folder:
        results += measured("SQLite", Path(folder) / "sqlite", None)
    with postgres() as url, tempfile.TemporaryDirectory(prefix="listing-") as folder:
        results += measured("PostgreSQL", Path(folder) / "postgres", url)
    report("listing", results)


def measured(name: str, folder: Path, url: str | None) -> list[Result]:
    home, config, port = folder / "home", folder / "config", free_port()
    home.mkdir(parents=True)
    if url is not None:
        os.environ[URL_VARIABLE] = url
        (home / "falaj.toml").write_text(f'[metadata]\ndriver = "postgres"\nurl = "env:{URL_VARIABLE}"\n')
    token = fill(home, config)
    variables = environment(FALAJ_CONFIG_DIR=str(config), FALAJ_TOKEN=token)
    with running([FALAJ, "--home", home, "up", "--port", str(port)], cwd=folder, env=variables) as pid:
        address = f"http://127.0.0.1:{port}"
        wait_until_ready(f"{address}/readyz", pid=pid)
        ways: list[tuple[str, Callable[[str], int]]] = [
            ("Python", lambda kind: by_python(address, token, kind)),
            ("REST", lambda kind: by_rest(address, token, kind)),
            ("the command line", lambda kind: by_command_line(address, variables, kind)),
        ]
        found = []
        for way, listed in ways:
            runs_s, models_s = timed(listed, "runs", RUNS), timed(listed, "models", MODELS)
            say(f"{name}, {way}: {RUNS:,} runs in {runs_s:.1f} s, {MODELS:,} models in {models_s:.1f} s")
            found.append(
                Result(
                    f"{name}, {way}: seconds for {RUNS:,} runs", runs_s, GOAL_S, GOAL_S, Rule.FALAJ_AT_MOST
                )
            )
            page_s = models_s * PAGE / MODELS
            goal = MODEL_PAGE_GOAL_S
            found.append(
                Result(f"{name}, {way}: seconds for {PAGE:,} models", page_s, goal, goal, Rule.FALAJ_AT_MOST)
            )
    return found


def timed(listed: Callable[[str], int], kind: str, expected: int) -> float:
    began = time.perf_counter()
    count = listed(kind)
    taken = time.perf_counter() - began
    if count != expected:
        raise RuntimeError(f"{count} {kind} were listed of {expected}")
    return taken


# --------------------------------------------------------------------------------------------- ways


def by_python(address: str, token: str, kind: str) -> int:
    seen: set[str] = set()
    with fj.connect(address, token) as platform:
        after: str | None = ""
        while after is not None:
            if kind == "runs":
                page: Any = platform.runs.list(experiments=("listed",), after=after, limit=PAGE)
            else:
                page = platform.models.list(after=after, limit=PAGE)
            seen |= {each.id for each in page.items}
            after = page.next
    return len(seen)


def by_rest(address: str, token: str, kind: str) -> int:
    seen: set[str] = set()
    given: dict[str, Any] = {"experiments": ["listed"]} if kind == "runs" else {}
    with httpx.Client(
        base_url=address, headers={"Authorization": f"Bearer {token}"}, trust_env=False
    ) as client:
        after: str | None = ""
        while after is not None:
            answer = client.post(
                f"/api/v1/{kind}/list", json={**given, "after": after, "limit": PAGE}, timeout=60
            )
            page = answer.raise_for_status().json()
            seen |= {each["id"] for each in page["items"]}
            after = page["next"]
    return len(seen)


def by_command_line(address: str, variables: dict[str, str], kind: str) -> int:
    what = ["runs", "list", "listed"] if kind == "runs" else ["models", "list"]
    command = [FALAJ, "--url", address, "--json", *what, "--all"]
    done = subprocess.run(command, env=variables, capture_output=True, check=True)
    return len({each["id"] for each in json.loads(done.stdout)["items"]})


# ------------------------------------------------------------------------------------------ contents


def fill(home: Path, config: Path) -> str:
    """Make a home with runs and models, and a viewer; return the viewer's token."""
    platform = assemble(open_home(home, config), as_owner=True)
    try:
        services = platform.services
        services.users.create("dana")
        services.workspaces.grant("default", "dana", role=Role.VIEWER)
        first = services.runs.start("listed")
        with platform.database.read() as tx:
            workspace = objects.resolve(tx, "default", kind="workspace", workspace=ROOT)
        owner, now = first.owner, datetime.now(UTC)
        made = [_object("run", workspace, owner, now + timedelta(microseconds=n)) for n in range(1, RUNS)]
        _insert(platform.database, objects_table, [_row(each) for each in made])
        row = {"experiment": first.experiment, "status": "finished", "ended_at": now}
        _insert(platform.database, runs, [{"id": each.id, "name": each.name, **row} for each in made])
        _fill_models(platform, workspace, owner, now)
        return services.tokens.issue(user="dana", purpose="benchmark").secret
    finally:
        platform.close()


def _fill_models(platform: LocalPlatform, workspace: StoredObject, owner: str, now: datetime) -> None:
    """Insert models, each with a version and two aliases that point at it."""
    made = [_object("model", workspace, owner, now, name=f"model-{n:05}") for n in range(MODELS)]
    of = {each.id: _object("model_version", workspace, owner, now, name=f"{each.name}@1") for each in made}
    _insert(platform.database, objects_table, [_row(each) for each in [*made, *of.values()]])
    _insert(platform.database, models, [{"id": each.id, "versions": 1} for each in made])
    facts = {"number": 1, "manifest": "{}", "key": "", "signature": ""}
    _insert(
        platform.database, versions, [{"id": each.id, "model": model, **facts} for model, each in of.items()]
    )
    both = [(model, version.id, alias) for model, version in of.items() for alias in ("champion", "shadow")]
    how = {"protected": False, "independent": False}
    _insert(platform.database, aliases, [{"model": model, "alias": alias, **how} for model, _, alias in both])
    move = {"seq": 1, "previous": None, "move": "promote", "by": owner, "at": now}
    moved = [{"model": model, "alias": alias, "version": version, **move} for model, version, alias in both]
    _insert(platform.database, alias_changes, moved)


def _object(
    kind: str, workspace: StoredObject, owner: Any, at: datetime, name: str | None = None
) -> StoredObject:
    ident = new_id("version" if kind == "model_version" else kind)
    return StoredObject(
        id=ident, workspace=workspace.id, kind=kind, name=name or ident, owner=owner, created_at=at
    )


def _row(new: StoredObject) -> dict[str, Any]:
    return new.model_dump(mode="json") | {"created_at": new.created_at, "deleted_at": None}


def _insert(database: Database, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    for start in range(0, len(rows), 5000):
        with database.write() as tx:
            tx.execute(sa.insert(table), rows[start : start + 5000])


@contextmanager
def postgres() -> Iterator[str]:
    import pgserver

    with tempfile.TemporaryDirectory(prefix="listing-pg-") as folder:
        server = pgserver.get_server(Path(folder) / "data")
        try:
            socket = server.get_postmaster_info().socket_dir
            yield f"postgresql+psycopg://postgres@/postgres?host={socket}"
        finally:
            server.cleanup()


if __name__ == "__main__":
    main()
