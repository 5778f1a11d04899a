"""Every block of the how-to pages and of the reference pages with examples runs as typed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from command_server import command_folder
from polling import eventually

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

HOWTO = [
    "read-an-audit-proof",
    "policies",
    "add-an-operation",
    "add-a-console-page",
    "bring-a-scikit-learn-model",
    "export-models",
    "edge-bundles",
    "call-by-grpc",
    "compute-features-on-request",
    "ensembles",
    "predict-in-batches",
    "split-traffic",
    "move-from-mlflow",
    "import-runs",
    "bring-your-own-torch-loop",
    "troubleshooting",
    "receive-events",
    "back-up-and-restore",
    "run-for-a-team",
]
"""The order on one platform; the last page adds users."""
ON_A_CLUSTER = ["build-images", "run-on-kubernetes", "operate-nodes"]
"""Pages whose commands need a cluster, GPUs or a Debian mirror; tests/kubernetes does what they say."""
IN_A_COPY = ["add-a-driver", "add-an-aggregation"]
"""Pages that change the repository; test_contributor_pages.py follows them in a copy."""
REFERENCE = ["features", "models", "serving", "monitoring", "pipelines", "tracking"]
"""Each page continues with the objects of those before it."""
RUNTIME = ["index", "data", "plan", "parallel", "memory", "checkpoints", "profile"]
FENCES = {"sh", "python", "toml", "yaml", "json", "text", "mermaid"}

STORY = {
    "read-an-audit-proof": [
        "sound: 1 entries",
        "only grew, from",
        "accepted; the log is signed again",
        "DAMAGED",
        "was edited",
        "exit status 1",
    ],
    "policies": ["no-export", "production", "owner"],
    "add-an-operation": ["/api/v1/counts/show"],
    "bring-a-scikit-learn-model": [
        "leavers@1 is registered",
        "leavers@2 onnx",
        "leavers is served by leavers@2",
    ],
    "export-models": [
        "leavers@2 is exported to repository: 6 files",
        "repository/leavers/2/model.onnx",
        "max_batch_size: 64",
        "storageUri: s3://models/leavers",
        "'leavers/2/model.onnx'",
    ],
    "edge-bundles": [
        "leavers@2 is exported to bundle, and to leavers-2.tar.gz",
        "leavers@2 is sound",
        "as --key says",
        '{"probability"',
        "batch 256: p50",
        "'many'",
        "exit status 1",
    ],
    "call-by-grpc": ["by gRPC: (2, 1)"],
    "compute-features-on-request": [
        "fraud is served by fraud@1",
        "ratio = amount / spending__mean; is_night = hour(event_time) < 6",
        "(typical of training set payments-1)",
        "spending has no value for key 999",
    ],
    "ensembles": [
        "checkout@1 is composed of 3 steps: clean, shop, score",
        "checkout is served by checkout@1",
        "abuse",
    ],
    "predict-in-batches": [
        "scores.parquet has the predictions of 200000 rows: customer,",
        "the predictions are in blob leaving-scores",
        "done more-scores",
    ],
    "split-traffic": [
        "one version for each of 40 keys",
        "asked for version 2",
        "probabilit",
        "undo   falaj endpoints route offers 1=100 --shadow 3=50",
        "2 0% (fallback)",
        "served,",
    ],
    "move-from-mlflow": ['{"experiment_id":"experiment_', "moved"],
    "import-runs": ["all of export.jsonl is here: 1 new run", "ppo", "finished"],
    "bring-your-own-torch-loop": ["loop@1 is registered"],
    "troubleshooting": [
        "isolation",
        "night",
        "out of memory: each process may have 300 MiB",
        "exit status 1",
    ],
    "receive-events": ["falaj.blobs.commit", "genuine falaj.webhooks.test webhook_"],
    "back-up-and-restore": ["the key file is in", "is sound"],
    "run-for-a-team": ["sara", "developer"],
    "features": ["300 only AE", "minutes_30d"],
    "models": ["churn@1 is registered", "churn@1 is champion", "churn@1 {'accuracy'"],
    "serving": ["churn is served by churn@1", "probability", "2 "],
    "monitoring": ["no drift", "0 alerts"],
    "pipelines": ["retrain-churn"],
}
"""Documented output of the blocks of a page."""


@pytest.mark.slow
def test_every_block_of_the_howto_pages_works(tmp_path: Path) -> None:
    assert sorted(HOWTO + ON_A_CLUSTER + IN_A_COPY) == sorted(page.stem for page in DOCS.glob("howto/*.md"))

    with running_platform(tmp_path) as environment:
        for page in HOWTO:
            folder = tmp_path / page
            folder.mkdir()
            (folder / "tests").symlink_to(ROOT / "tests")  # pages for contributors run in the repository
            run_page(DOCS / "howto" / f"{page}.md", folder, environment)


@pytest.mark.slow
def test_every_block_of_the_reference_pages_works(tmp_path: Path) -> None:
    folder = tmp_path / "reference"
    folder.mkdir()

    with running_platform(tmp_path) as environment:
        for page in REFERENCE:
            run_page(DOCS / "reference" / f"{page}.md", folder, environment)


@pytest.mark.slow
def test_every_example_of_the_runtime_pages_works(tmp_path: Path) -> None:
    """In one process, which imports torch once."""
    assert sorted(RUNTIME) == sorted(page.stem for page in DOCS.glob("reference/runtime/*.md"))
    scripts = []
    for page in RUNTIME:
        text = (DOCS / "reference" / "runtime" / f"{page}.md").read_text()
        blocks = [code for kind, how, code in BLOCK.findall(text) if kind == "python"]
        assert blocks, f"{page}.md has no example"
        scripts.append(tmp_path / f"{page}_page.py")
        scripts[-1].write_text("\n".join(blocks))
    (tmp_path / "pages.py").write_text(
        "import runpy, sys\nfor script in sys.argv[1:]:\n    print(script, flush=True)\n    runpy.run_path(script)\n"
    )

    environment = os.environ | {"FALAJ_CACHE": str(tmp_path / "cache")}
    run([sys.executable, "pages.py", *map(str, scripts)], tmp_path, environment)


@contextmanager
def running_platform(folder: Path) -> Iterator[dict[str, str]]:
    """Start `falaj up` on a home, and yield the environment in which commands reach it."""
    home = folder / "home"
    home.mkdir(mode=0o700)
    (home / "falaj.toml").write_text(
        '[server]\nport = 0\n\n[serving]\nport = 0\nlog_every = "PT1S"\n\n[egress]\nallow = ["127.0.0.1"]\n'
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": path,
        "FALAJ_HOME": str(home),
        "FALAJ_CONFIG_DIR": str(folder / "config"),
        "NO_COLOR": "1",
        "COLUMNS": "150",
    }
    command = [sys.executable, "-m", "falaj", "up"]
    with (
        command_folder() as quick,
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as platform,
    ):
        try:
            eventually(lambda: (home / "run.json").exists())
            url = json.loads((home / "run.json").read_text())["url"]
            yield environment | {"PATH": f"{quick}:{path}", "FALAJ_URL": url}
        finally:
            platform.send_signal(signal.SIGTERM)


def run_page(page: Path, folder: Path, environment: dict[str, str]) -> None:
    printed = []
    for kind, how, text in BLOCK.findall(page.read_text()):
        assert kind in FENCES, f"{page.name}: a block has no language: {text[:80]}"
        if "file=" in how:
            (folder / how.partition("file=")[2].strip()).write_text(text)
        elif kind == "sh":
            printed.append(run(["bash", "-euo", "pipefail", "-c", text], folder, environment))
        elif kind == "python":
            printed.append(run([sys.executable, "-c", text], folder, environment))
    missing = [words for words in STORY.get(page.stem, ()) if words not in "".join(printed)]
    assert missing == [], f"{page.name} does not print {missing}: {printed}"


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{command[-1]}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout + ran.stderr
