"""A running training is moved from a pool with GPUs to one without, by real processes, and its losses stay the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import controller_processes
from controller_processes import ControllerProcesses, run_controllers
from falaj.assembly.compute import LocalCompute
from falaj.records.scheduling.snapshot import Node
from falaj.records.training.jobs import JobState
from falaj.scheduling import node_from
from platforms import make_platform
from polling import eventually
from recorded_machines import machine

pytestmark = pytest.mark.slow

STEPS = 60
FIT = f"""
import os, time, torch
import falaj as fj

torch.set_num_threads(1)
SLOW = os.environ.get("FALAJ_ATTEMPT") == "1"

def loss(out, target):
    if SLOW:
        time.sleep(0.2)
    return torch.nn.functional.mse_loss(out, target)

def train(**options):
    torch.manual_seed(3)
    rows = torch.randn(64, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    data = rows, rows.sum(1, keepdim=True)
    return fj.fit(model, loss, data, steps={STEPS}, batch_size=8, checkpoint_every=5, seed=1, tune="off", **options)

if __name__ == "__main__":
    print("cards:", os.environ.get("CUDA_VISIBLE_DEVICES", "not set"), flush=True)
    train()
"""
WITH_NODES = """
import json
from falaj.assembly.compute import LocalCompute
from falaj.records.scheduling.snapshot import Node
known = tuple(Node.model_validate(each) for each in json.loads({nodes!r}))
LocalCompute.nodes = lambda _: known
"""


@pytest.fixture
def controllers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControllerProcesses]:
    """Yield controllers that see this machine as two nodes: one with recorded GPUs, and one without."""
    with make_platform(tmp_path) as platform, run_controllers(platform, tmp_path) as made:
        (here,) = platform.parts.compute.nodes()
        nodes = as_two(here, tmp_path)
        monkeypatch.setattr(LocalCompute, "nodes", lambda _: nodes)
        nodes_json = json.dumps([each.model_dump(mode="json") for each in nodes])
        monkeypatch.setattr(
            controller_processes,
            "CONTROLLER",
            WITH_NODES.format(nodes=nodes_json) + controller_processes.CONTROLLER,
        )
        yield made


def as_two(here: Node, folder: Path) -> tuple[Node, Node]:
    from falaj.records.governance.residency import Zone

    zone = Zone(name=here.zone, jurisdiction=here.jurisdiction)
    (facts,) = machine("h200", folder / "recorded").nodes()
    cards = node_from(facts, zone=zone).gpus
    fast = here.model_copy(update={"name": "fast", "pool": "cards", "gpus": cards})
    return fast, here.model_copy(update={"name": "plain", "pool": "frugal"})


def test_a_fit_moved_to_cpus_continues_with_the_same_losses(controllers: ControllerProcesses) -> None:
    controller = controllers.start_controller()
    job = controllers.submit(FIT, gpus=1, timeout="PT3M")
    saved = lambda: controllers.platform.jobs.checkpoints(job.id)  # noqa: E731
    eventually(lambda: controllers.state(job).ended or len(saved()) >= 2)
    assert controllers.state(job) is JobState.RUNNING, (
        controllers.platform.jobs.show(job.id).reason,
        controllers.log(job),
    )
    assert controllers.platform.jobs.show(job.id).node == "fast"
    controller.kill()  # the next controller must find out by itself
    controller.wait()

    moved = controllers.platform.jobs.move(job.id, to="cpu")

    assert moved.step is not None
    controllers.start_controller()
    done = controllers.ends(job)
    assert (done.state, done.attempt, done.node) == (JobState.DONE, 2, "plain"), done.reason
    assert (done.spec.gpus, done.preemptions, done.submitted_at) == (0, 0, job.submitted_at)
    undisturbed: dict[str, object] = {"__name__": "undisturbed"}
    exec(compile(FIT, "fit.py", "exec"), undisturbed)
    expected = undisturbed["train"](device="cpu").losses  # type: ignore[operator]
    by_step = controllers.losses(job)
    assert [by_step[step] for step in range(1, STEPS + 1)] == [{value} for value in expected]
    log = controllers.log(job)
    assert "resuming after step" in log
    assert "cards: GPU-" not in log
