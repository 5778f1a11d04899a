"""The agent beside a run: on a folder, and over a socket."""

from __future__ import annotations

import errno
import io
import math
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from falaj.training.runtime.agent import agents, run_files
from falaj.training.runtime.agent.agents import (
    Agent,
    FolderAgent,
    MetricValue,
    RunHistory,
    read_metrics,
)
from falaj.training.runtime.agent.protocol import SocketAgent, receive, send, serve_calls
from falaj.training.runtime.checkpointing.certificate import verify_certificate
from falaj.training.runtime.checkpointing.storage.store import Retention, SaveId
from falaj.training.runtime.errors import AgentLost, CheckpointDamaged, CheckpointFailed, InvalidTraining
from falaj.training.runtime.fit import FitResult, fit
from falaj.training.runtime.reporting import report as reporting
from falaj.training.runtime.reporting.tensorboard import EventFile
from polling import let_pass


@pytest.fixture(params=["folder", "socket"])
def agent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Agent]:
    """An agent that keeps everything in `tmp_path`."""
    local = FolderAgent(tmp_path)
    if request.param == "folder":
        yield local
    else:
        yield from over_socket(local)
    local.close()


def over_socket(local: FolderAgent) -> Iterator[Agent]:
    near, far = socket.socketpair()
    with near, far, far.makefile("rwb") as stream:
        served = threading.Thread(target=serve_calls, args=(stream, local))
        served.start()
        agent = SocketAgent(near.makefile("rwb"))
        yield agent
        agent.close()
        near.shutdown(socket.SHUT_RDWR)
        served.join()


def test_metrics_come_back(agent: Agent, tmp_path: Path) -> None:
    metrics = [MetricValue(1, "loss", 0.1 + 0.2), MetricValue(2, "loss", math.inf), MetricValue(2, "ε", -1.5)]

    agent.log(metrics)

    assert list(read_metrics(tmp_path)) == metrics


def test_history_of_earlier_attempts_is_read(agent: Agent) -> None:
    agent.log([MetricValue(step, "loss", step / 3) for step in (1, 2, 3)])
    agent.log([MetricValue(3, "evaluation", 7.0), MetricValue(2, "loss", 0.5)])
    agent.params({"lr": 0.1, "resumed.1": "from here"})

    assert agent.load_history(1) == RunHistory([(2, 2 / 3), (3, 1.0), (2, 0.5)], ["from here"])
    assert agent.load_history(3) == RunHistory([], ["from here"])


def test_checkpoints_come_back_newest_first(agent: Agent) -> None:
    store = agent.checkpoints()
    for step, data in ((9, b"old"), (10, b"newer")):
        mark = SaveId(step, f"{step:032x}")
        store.save_part(mark, 0, [data[:2], memoryview(data[2:])])
        store.commit(mark, [len(data)], b"the manifest", Retention())

    assert store.steps() == [10, 9]
    assert store.load_manifest(10) == b"the manifest"
    assert store.load_part(10, 0, offset=1, length=3) == b"ewe"
    assert store.load_part(10, 0, offset=1, length=100) == b"ewer"


def test_an_uncommitted_save_is_not_a_checkpoint(agent: Agent) -> None:
    store, mark = agent.checkpoints(), SaveId(3, "a" * 32)
    store.save_part(mark, 0, [b"part"])

    assert store.steps() == []
    with pytest.raises(CheckpointDamaged):
        store.load_part(3, 0, offset=0, length=1)
    with pytest.raises(CheckpointDamaged):
        store.load_manifest(3)
    with pytest.raises((CheckpointFailed, AgentLost), match="missing"):
        store.commit(mark, [4, 4], b"of two parts", Retention())
    assert store.steps() == []


def test_a_run_trains_and_resumes(agent: Agent, tmp_path: Path) -> None:
    rows = torch.randn(20, 3)
    for steps in (4, 8):
        result = fit(
            nn.Linear(3, 3), nn.functional.mse_loss, rows, steps=steps, batch_size=5, run=agent, device="cpu"
        )

    assert result.resumed_from == 4
    losses = [metric for metric in read_metrics(tmp_path) if metric.name == "loss"]
    assert [metric.step for metric in losses] == list(range(1, 9))
    assert (tmp_path / "progress.json").read_text() == '{"step": 8, "total": 8}'


def test_a_missing_or_disconnected_agent_is_lost(tmp_path: Path) -> None:
    near, far = socket.socketpair()
    with near:
        agent = SocketAgent(near.makefile("rwb"))
        far.close()

        with pytest.raises(AgentLost, match="lost the connection to the agent during heartbeat"):
            agent.heartbeat()
    with pytest.raises(AgentLost, match="no agent answers"):
        SocketAgent.connect(str(tmp_path / "no.sock"))


def test_the_reconnect_timeout_starts_when_the_agent_disconnects(tmp_path: Path) -> None:
    """Sending a part may take longer than the timeout."""
    path = tmp_path / "agent.sock"

    def serve(listener: socket.socket) -> None:
        for answers in (False, True):
            connection, _ = listener.accept()
            with connection, connection.makefile("rwb") as stream:
                receive(stream)
                let_pass(0.8)
                if answers:
                    send(stream, {"result": [7]})

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        served = threading.Thread(target=serve, args=(listener,))
        served.start()
        agent = SocketAgent.connect(str(path), patience_s=0.5)

        assert agent.call("checkpoint_steps")[0] == [7]

        agent.close()
        served.join()


@pytest.mark.parametrize(
    "frame",
    [b"\0", b"\xff\xff\xff\xff", b"\0\0\0\2[]", b'\0\0\0\x0a{"body":9}', b"\0\0\0\x02{}", b"\0\0\0\x05junk!"],
)
def test_a_malformed_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each in its own words
        receive(io.BytesIO(frame))


def test_an_unknown_call_is_answered_with_an_error(tmp_path: Path) -> None:
    local = FolderAgent(tmp_path)
    for agent in over_socket(local):
        with pytest.raises(AgentLost, match="unknown call 'drop_tables'"):
            agent.call("drop_tables")  # type: ignore[attr-defined]

        assert agent.heartbeat()
    local.close()


# ------------------------------------------------------------------------- full disks and damaged files


class FullDisk:
    """Replaces `os.write`: `free_bytes` more bytes fit."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes, self._write = free_bytes, os.write

    def __call__(self, handle: int, data: bytes) -> int:
        if not self.free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(handle, data[: self.free_bytes])
        self.free_bytes -= written
        return written


def test_metrics_refused_by_a_full_disk_are_written_later_and_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = [MetricValue(step, "loss", step / 7) for step in range(9)]
    agent, disk = FolderAgent(tmp_path), FullDisk(free_bytes=40)
    monkeypatch.setattr(os, "write", disk)

    agent.log(metrics[:1])
    for each in metrics[1:8]:
        agent.log([each])
    full = list(read_metrics(tmp_path))
    disk.free_bytes = 10_000
    agent.log(metrics[8:])
    agent.close()

    assert full == metrics[:1]
    assert list(read_metrics(tmp_path)) == metrics
    assert capsys.readouterr().err.count("metrics.jsonl cannot be written: No space left on device") == 1


def test_partial_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, metrics = os.write, [MetricValue(step, "loss", step / 7) for step in range(9)]
    agent = FolderAgent(tmp_path)
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:7]))

    agent.log(metrics)

    assert list(read_metrics(tmp_path)) == metrics
    agent.close()


def test_a_run_continues_on_a_full_disk_and_reports_lost_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(reporting, "SEND_INTERVAL_S", 0.0)
    monkeypatch.setattr(run_files, "replace_file", refuse)
    monkeypatch.setattr(agents, "replace_file", refuse)
    monkeypatch.setattr(run_files.AppendOnlyFile, "append", refuse)
    monkeypatch.setattr(run_files.AppendOnlyFile, "waiting", 4)
    monkeypatch.setattr(EventFile, "add", refuse)

    result = small_run(tmp_path, tensorboard=True)

    output = capsys.readouterr().err
    assert result.step == 4
    for name in ("metrics.jsonl", "params.json", "progress.json", "TensorBoard's event file"):
        assert output.count(f"{name} cannot be written: No space left on device. Training continues") == 1
    assert "4 metrics and" in output
    assert f"could not be written to {tmp_path}, and are lost" in output
    monkeypatch.undo()
    assert small_run(tmp_path, steps=6).resumed_from == 4


def small_run(folder: Path, **options: Any) -> FitResult:
    torch.manual_seed(0)
    rows = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {"steps": 4, "batch_size": 5, "run": folder, "device": "cpu", **options}
    return fit(nn.Linear(3, 3), nn.functional.mse_loss, rows, **given)


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("params.json", b"", "params.json"),
        ("params.json", b"[1]", "params.json"),
        ("params.json", b"\xff\xfe", "params.json"),
        ("metrics.jsonl", b'5\n{"a": 1, "b": 2, "c": 3}\nnull\n', "3 lines of metrics.jsonl"),
        ("metrics.jsonl", b"\xff\xfe\n", "1 line of metrics.jsonl"),
        ("metrics.jsonl", b"[" * 100_000, "1 line of metrics.jsonl"),
        ("metrics.jsonl", b'["1", "loss", 2]\n[1, "loss", []]\n', "2 lines of metrics.jsonl"),
    ],
    ids=["empty", "list", "no text", "odd lines", "no text in lines", "deep", "odd values"],
)
def test_damaged_files_beside_a_good_checkpoint_are_skipped_and_recorded_in_the_certificate(
    tmp_path: Path, name: str, damage: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small_run(tmp_path, exact=True)
    path = tmp_path / name
    path.write_bytes(damage if name == "params.json" else path.read_bytes() + damage)

    again = small_run(tmp_path, exact=True, steps=6)

    assert again.resumed_from == 4
    assert again.certificate.unread == (words,)
    assert f"{words} could not be read; skipped in the comparison" in capsys.readouterr().err
    assert verify_certificate(tmp_path / "certificate.json").unread == (words,)
    assert small_run(tmp_path, exact=True, steps=8).certificate.unread == (words,)


@pytest.mark.parametrize("place", ["a file", "/proc/run"])
def test_an_unusable_run_folder_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").write_text("")

    with pytest.raises(InvalidTraining, match="the run folder cannot be used") as refusal:
        small_run(tmp_path / place)

    assert [fault.where for fault in refusal.value.faults] == ["run"]
    assert "fix" in str(refusal.value)
