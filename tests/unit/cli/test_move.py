"""`falaj jobs move`: what it says, what it shows afterwards, and how it refuses."""

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
    """Two machines, one with a GPU; nothing runs on them."""
    (tmp_path / "says.py").write_text("print(1)")
    shared = {"zone": "local", "jurisdiction": "AE", "cpus": 4, "memory_bytes": 8 << 30}
    nodes = (
        Node(name="fast", pool="cards", gpus=(GPU,), **shared),  # type: ignore[arg-type]
        Node(name="plain", pool="frugal", **shared),  # type: ignore[arg-type]
    )
    monkeypatch.setattr(LocalCompute, "nodes", lambda _: nodes)
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


def test_a_waiting_job_is_moved_and_shown_as_asked_and_as_moved(falaj: CommandLine, tmp_path: Path) -> None:
    job = falaj.json("train", tmp_path / "says.py", "--gpus", "1", "--detach")["id"]

    moved = falaj.done("jobs", "move", job, "--to", "cpu", "--cpus", "2")

    assert f"job {job} is moved: it is queued, and starts with 2 CPUs, no GPU, in pool frugal" in moved.out
    assert f"next   falaj jobs show {job}" in moved.out
    shown = falaj.done("jobs", "show", job).out
    assert "2 CPUs" in shown
    assert "1 CPU, 1 GPU" in shown.split("first requested")[1].splitlines()[0]
    assert falaj.json("jobs", "show", job)["spec"]["asked"]["gpus"] == 1


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--to", "moon"), 2, "cpu, gpu, or a pool: cards, frugal"),
        (("--to", "cards"), 0, "1 GPU, in pool cards"),
        (("--to", "gpu", "--gpus", "2"), 2, "at most 1 on one machine here"),
        (("--to", "gpu"), 1, "asks for just that already: 1 CPU, 1 GPU"),
        (("--to", "cpu", "--gpus", "x"), 2, "--gpus"),
        ((), 2, "--to"),
    ],
    ids=str,
)
def test_where_it_cannot_go_is_said(
    falaj: CommandLine, tmp_path: Path, words: tuple[str, ...], status: int, said: str
) -> None:
    job = falaj.json("train", tmp_path / "says.py", "--gpus", "1", "--detach")["id"]

    ran = falaj("jobs", "move", job, *words)

    assert ran.status == status, ran
    assert said in ran.out + ran.err


def test_a_job_that_is_not_there_is_not_moved(falaj: CommandLine) -> None:
    ran = falaj("jobs", "move", "nope", "--to", "cpu")

    assert (ran.status, "there is no job 'nope'" in ran.err) == (1, True)
