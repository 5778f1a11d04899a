"""Make the home that tests/scenarios/test_old_home.py opens; README.md says when and how."""

from __future__ import annotations

import json
import os
import platform as machine
import shutil
import socket
import sqlite3
import sys
import tarfile
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
from onnx import TensorProto, helper

import falaj as fj
from falaj.assembly.home import open_home
from falaj.assembly.platform import assemble
from falaj.control.authorization import controller_caller
from falaj.governance.operations.caller import Caller, acting_as
from falaj.monitoring.windows.collector import Collector
from falaj.records.control.pipelines import Pipeline
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.governance.identity import Role
from falaj.records.scheduling.snapshot import Quota
from falaj.records.training.jobs import JobSpec
from falaj.sdk.platform import Platform
from falaj.version import VERSION

HOST = "old-host"
PAGE_BYTES = 4096
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
YEAR = timedelta(days=366)
CONFIG = """
[zones.local]
jurisdiction = "AE"
default = true

[zones.second]
jurisdiction = "AE"

[egress]
allow = ["127.0.0.1:9"]
"""
POLICY = """
@id("no-reading") forbid (principal, action in [Action::"blobs.read", Action::"blobs.copy"], resource)
when { resource.name == "plans" };
"""
SCRIPT = """
import falaj as fj

print("hello from the job")
fj.job.log(step=1, loss=0.25)
(fj.job.outputs / "result.txt").write_text("done")
"""


def main(folder: Path) -> None:
    os.environ |= {"FALAJ_CONFIG_DIR": str(folder / "config"), "LOGNAME": "amal"}
    socket.gethostname = machine.node = lambda: HOST  # the archive says nothing of the machine that made it
    open_home(folder / "home", folder / "config").toml.write_text(CONFIG)
    with fj.open(folder / "home") as platform:
        facts = fill(platform, folder)
    parts = assemble(open_home(folder / "home", folder / "config"), as_owner=True)
    with Platform(parts.services, where="old", on_close=parts.close) as platform:  # no controller runs
        record_window(platform, controller_caller(parts.database))
        facts["copy"] = platform.blobs.copy("data", "second", name="copied").id
        list(platform.audit.export())
        facts["entries"] = platform.audit.list(limit=1).items[0].seq + 1
    (folder / "facts.json").write_text(
        json.dumps(facts | {"made_at": datetime.now(UTC).isoformat()}, indent=1)
    )
    pack(folder)


def fill(platform: Platform, folder: Path) -> dict[str, Any]:
    facts = add_people(platform)
    platform.put("plans", b"the plans", workspace="risk")
    platform.put("open", b"open to all", workspace="risk")
    platform.put("data", b"some bytes")
    platform.policies.publish("reading", text=POLICY, workspace="risk")
    platform.secrets.set("database", "hunter2")
    platform.queues.set("cards", quota=Quota(gpus=2))
    platform.queues.set_budget("risk", gpu_hours=100, period="month")
    platform.webhooks.create("deploys", "http://127.0.0.1:9/hook", types=("endpoints.*",))
    platform.webhooks.pause("deploys")
    with fj.once("create-north"):
        platform.workspaces.create("north")
    add_features(platform)
    facts["run"] = add_run(platform)
    facts["job"] = run_job(platform, folder)
    add_model(platform)
    return facts


def add_people(platform: Platform) -> dict[str, Any]:
    platform.users.create("sara")
    platform.users.create("ci", kind="service")
    platform.groups.create("analysts")
    platform.groups.add("analysts", "sara")
    platform.workspaces.create("risk")
    platform.workspaces.grant("risk", "analysts", role=Role.DEVELOPER)
    platform.workspaces.grant("risk", "ci", role=Role.DEVELOPER)
    platform.workspaces.grant("default", "ci", role=Role.VIEWER)
    given = {
        "scoped": {"user": "ci", "actions": ("blobs.read", "users.whoami")},
        "whole": {"user": "ci", "actions": ("blobs.*",), "workspace": "risk"},
        "sara": {"user": "sara"},
    }
    return {
        name: platform.tokens.issue(purpose=name, expires_in=YEAR, **fields).secret
        for name, fields in given.items()
    }


def add_features(platform: Platform) -> None:
    columns = (Feature(name="spend", type=ColumnType.FLOAT),)
    view = FeatureView(name="facts", entities=("customer",), columns=columns, created_time="created_time")
    platform.apply([Entity(name="customer", key="customer"), view])
    times = [NOON + timedelta(hours=hour) for hour in range(40)]
    keys = ["a", "b", *(f"c{number}" for number in range(38))]
    spend = [number + 1.5 for number in range(40)]
    rows = {"customer": keys, "event_time": times, "created_time": times, "spend": spend}
    platform.ingest("facts", pa.table(rows))
    platform.features.materialize("facts")
    late = [NOON + timedelta(days=9)] * 40
    platform.training_set(
        "churn-train",
        spine=pa.table({"customer": keys, "event_time": late, "late": [0, 1] * 20}),
        views=["facts"],
    )


def add_run(platform: Platform) -> str:
    with platform.run("trials", name="first", params={"lr": "0.1"}, tags={"team": "risk"}) as run:
        for step in range(3):
            run.log(step=step, loss=1.0 / (step + 1))
        run.log_table("losses.csv", pa.table({"loss": [1.0, 0.5]}))
        return str(run.id)


def run_job(platform: Platform, folder: Path) -> str:
    (folder / "code").mkdir()
    (folder / "code" / "train.py").write_text(SCRIPT)
    job = platform.train(folder / "code" / "train.py", name="train", memory="512MiB")
    *_, last = platform.jobs.wait(job.id)
    if last.state != "done":
        raise SystemExit(f"the job {last.state}: {last.reason}")
    shutil.rmtree(folder / "code")
    return str(job.id)


def add_model(platform: Platform) -> None:
    blob = platform.put("model", doubling())
    for number in (1, 2):
        metrics = {"auc": 0.8 + number / 100}
        platform.models.register(
            "churn",
            files=(blob.id,),
            paths=("model.onnx",),
            training_set="dataset:churn-train",
            metrics=metrics,
        )
        platform.models.promote(f"churn@{number}", to="champion")
    platform.models.set_gates("churn", alias="champion", metrics=("auc >= 0.5",))
    platform.endpoints.deploy("churn", model="churn@1")
    platform.monitoring.watch("churn", reference="churn-train", columns=("facts__spend",), name="spending")
    platform.pipelines.apply(
        Pipeline(
            name="weekly",
            endpoint="churn",
            model="churn",
            spine="facts",
            views=("facts",),
            window=timedelta(days=30),
            job=JobSpec(name="train", script="train.py"),
        )
    )


def record_window(platform: Platform, controller: Caller) -> None:
    """Record forty rows that the endpoint was asked to predict."""
    moments = (datetime.now(UTC) + timedelta(seconds=10 * number) for number in count())
    collector = Collector(clock=lambda: next(moments))
    collector.add("churn", "churn@1", {"facts__spend": np.arange(40.0)})
    with acting_as(controller):
        for endpoint, window in collector.flush():
            platform.monitoring.record(endpoint, windows=(window,))
        platform.monitoring.evaluate()


def doubling() -> bytes:
    """Return an ONNX model that doubles its input."""
    given, made = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1]) for name in ("facts__spend", "score")
    )
    two = helper.make_tensor("two", TensorProto.FLOAT, [1], [2.0])
    node = helper.make_node("Mul", ["facts__spend", "two"], ["score"])
    graph = helper.make_graph([node], "doubling", [given], [made], [two])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(onnx.load_from_string(model.SerializeToString()).SerializeToString())


def pack(folder: Path) -> None:
    for database in (folder / "home").glob("*.db"):
        with sqlite3.connect(database) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute("VACUUM")
    online = folder / "home" / "online" / "local"  # LMDB has reserved space behind its last page
    os.truncate(online, -(-len(online.read_bytes().rstrip(b"\0")) // PAGE_BYTES) * PAGE_BYTES)

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(folder / f"home-{VERSION}.tar.xz", "w:xz", preset=9) as archive:
        for name in ("home", "config", "facts.json"):
            archive.add(folder / name, name, filter=plain)


if __name__ == "__main__":
    os.umask(0o077)
    main(Path(sys.argv[1]))
