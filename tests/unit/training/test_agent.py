"""The agent beside a run: on a folder, and over a socket; and the bytes of a checkpoint."""

from __future__ import annotations

import io
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from falaj.training.runtime.agent import Agent, LocalAgent, Metric, read_metrics
from falaj.training.runtime.checkpoint_format import decode, encode
from falaj.training.runtime.errors import AgentLost, CheckpointDamaged
from falaj.training.runtime.fit import fit
from falaj.training.runtime.wire import SocketAgent, answer_calls, receive


@pytest.fixture(params=["folder", "socket"])
def agent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Agent]:
    """An agent that keeps everything in `tmp_path`."""
    local = LocalAgent(tmp_path)
    if request.param == "folder":
        yield local
    else:
        yield from over_socket(local)
    local.close()


def over_socket(local: LocalAgent) -> Iterator[Agent]:
    near, far = socket.socketpair()
    with near, far, far.makefile("rwb") as stream:
        served = threading.Thread(target=answer_calls, args=(stream, local))
        served.start()
        agent = SocketAgent(near.makefile("rwb"))
        yield agent
        agent.close()
        near.shutdown(socket.SHUT_RDWR)
        served.join()


def test_metrics_come_back(agent: Agent, tmp_path: Path) -> None:
    metrics = [Metric(1, "loss", 0.1 + 0.2), Metric(2, "loss", math.inf), Metric(2, "ε", -1.5)]

    agent.log(metrics)

    assert list(read_metrics(tmp_path)) == metrics


def test_checkpoints_come_back_newest_first(agent: Agent) -> None:
    agent.save_checkpoint(9, [b"old"])
    agent.save_checkpoint(10, [b"new", memoryview(b"er")])

    assert agent.checkpoint_steps() == [10, 9]
    assert agent.load_checkpoint(10) == b"newer"


def test_a_checkpoint_that_is_not_there_is_damaged(agent: Agent) -> None:
    with pytest.raises(CheckpointDamaged):
        agent.load_checkpoint(3)


def test_a_run_trains_and_resumes(agent: Agent, tmp_path: Path) -> None:
    rows = torch.randn(20, 3)
    for steps in (4, 8):
        result = fit(
            nn.Linear(3, 3), nn.functional.mse_loss, rows, steps=steps, batch_size=5, run=agent, device="cpu"
        )

    assert result.resumed_from == 4
    assert [metric.step for metric in read_metrics(tmp_path)] == list(range(1, 9))
    assert (tmp_path / "progress.json").read_text() == '{"step": 8, "total": 8}'


def test_an_agent_that_is_not_there_or_goes_away_is_lost(tmp_path: Path) -> None:
    near, far = socket.socketpair()
    with near:
        agent = SocketAgent(near.makefile("rwb"))
        far.close()

        with pytest.raises(AgentLost, match="went away during heartbeat"):
            agent.heartbeat()
    with pytest.raises(AgentLost, match="no agent answers"):
        SocketAgent.connect(str(tmp_path / "no.sock"))


@pytest.mark.parametrize(
    "frame",
    [b"\0", b"\xff\xff\xff\xff", b"\0\0\0\2[]", b'\0\0\0\x0a{"body":9}', b"\0\0\0\x02{}", b"\0\0\0\x05junk!"],
)
def test_a_frame_that_makes_no_sense_is_refused(frame: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each in its own words
        receive(io.BytesIO(frame))


def test_an_unknown_call_is_answered_with_an_error(tmp_path: Path) -> None:
    local = LocalAgent(tmp_path)
    for agent in over_socket(local):
        with pytest.raises(AgentLost, match="unknown call 'drop_tables'"):
            agent._call("drop_tables")  # type: ignore[attr-defined]

        assert agent.heartbeat()
    local.close()


# --------------------------------------------------------------------------------------------- format


TENSORS = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "half": torch.randn(5).to(torch.bfloat16),
    "whole": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "nothing": torch.empty(0, 3),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "complex": torch.tensor([1 + 2j]).conj(),
}


def written(tensors: dict[str, torch.Tensor]) -> bytearray:
    return bytearray(b"".join(encode({"step": 3, "π": 0.1}, tensors)))


def test_tensors_come_back_to_the_bit() -> None:
    contents = decode(written(TENSORS))

    assert contents.manifest == {"step": 3, "π": 0.1}
    assert contents.tensors.keys() == TENSORS.keys()
    for name, tensor in contents.tensors.items():
        assert tensor.dtype == TENSORS[name].dtype
        assert tensor.shape == TENSORS[name].shape
        assert torch.equal(tensor, TENSORS[name])


def test_shared_memory_is_stored_once() -> None:
    weight = torch.randn(1000)

    assert len(written({"a": weight, "b": weight})) < len(written({"a": weight})) + 100
    assert torch.equal(decode(written({"a": weight, "b": weight})).tensors["b"], weight)


@given(place=st.integers(0, len(written(TENSORS)) - 1), bit=st.integers(0, 7))
def test_an_altered_bit_is_found_or_lies_in_the_padding(place: int, bit: int) -> None:
    data = written(TENSORS)
    data[place] ^= 1 << bit

    try:
        contents = decode(data)
    except CheckpointDamaged:
        return
    assert all(torch.equal(contents.tensors[name], tensor) for name, tensor in TENSORS.items())


@given(length=st.integers(0, len(written(TENSORS)) - 64))
def test_a_cut_checkpoint_is_found(length: int) -> None:
    with pytest.raises(CheckpointDamaged):
        decode(written(TENSORS)[:length])
