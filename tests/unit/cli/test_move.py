"""`falaj jobs move`: its output, the job shown afterwards, and its refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import CommandLine, command_line, make_template
from falaj.assembly.compute import LocalCompute
from falaj.records.scheduling.snapshot import Gpu, Node

GPU = Gpu(id="GPU-0", model="H200", memory_bytes=1 << 37)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def falaj(
    template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    """Two idle nodes, one with a GPU."""
    (tmp_path / "says.py").write_text("print(1)")
    shared = {"zone": "local", "jurisdiction": "AE", "cpus": 4, "memory_bytes": 8 << 30}
    nodes = (
        Node(name="fast", pool="cards", gpus=(GPU,), **shared),  # type: ignore[arg-type]
        Node(name="plain", pool="frugal", **shared),  # type: ignore[arg-type]
    )
    monkeypatch.setattr(LocalCompute, "nodes", lambda _: nodes)
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


@pytest.mark.slow
def test_a_waiting_job_is_moved_and_shown_as_submitted_and_as_moved(
    falaj: CommandLine, tmp_path: Path
) -> None:
    job = falaj.json("train", tmp_path / "says.py", "--gpus", "1", "--detach")["id"]

    moved = falaj.done("jobs", "move", job, "--to", "cpu", "--cpus", "2")

    assert f"job {job} is moved: it is queued, and starts with 2 CPUs, no GPU, in pool frugal" in moved.out
    assert f"next   falaj jobs show {job}" in moved.out
    shown = falaj.done("jobs", "show", job).out
    assert "2 CPUs" in shown
    assert "1 CPU, 1 GPU" in shown.split("first requested")[1].splitlines()[0]
    assert falaj.json("jobs", "show", job)["spec"]["asked"]["gpus"] == 1


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("--to", "moon"), 2, "cpu, gpu, or a pool: cards, frugal"),
        (("--to", "cards"), 0, "1 GPU, in pool cards"),
        (("--to", "gpu", "--gpus", "2"), 2, "at most 1 on one machine here"),
        (("--to", "gpu"), 1, "asks for just that already: 1 CPU, 1 GPU"),
        (("--to", "cpu", "--gpus", "x"), 2, "--gpus"),
        (("--nodes", "2"), 2, "could never start"),
        (("--nodes", "2", "--to", "cpu"), 0, "2 nodes of 1 CPU, no GPU, in pool frugal"),
        ((), 2, "cpu, gpu or a pool; or a number of nodes, CPUs or GPUs"),
    ],
    ids=str,
)
def test_an_impossible_move_is_refused_with_the_reason(
    falaj: CommandLine, tmp_path: Path, words: tuple[str, ...], status: int, message: str
) -> None:
    job = falaj.json("train", tmp_path / "says.py", "--gpus", "1", "--detach")["id"]

    ran = falaj("jobs", "move", job, *words)

    assert ran.status == status, ran
    assert message in ran.out + ran.err


def test_an_unknown_job_is_not_moved(falaj: CommandLine) -> None:
    ran = falaj("jobs", "move", "nope", "--to", "cpu")

    assert (ran.status, "there is no job 'nope'" in ran.err) == (1, True)
