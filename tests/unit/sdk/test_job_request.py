"""Job requests: every spelling, and all faults at once with their fields."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from falaj.errors import InvalidInput
from falaj.records.sizes import read_size, spell_size
from falaj.records.training.jobs import JobSpec
from falaj.sdk.job_request import JobRequest, build_spec, parse_job_request


def form(**given: Any) -> JobRequest:
    return parse_job_request(given, place=".".join)


def spec(**given: Any) -> JobSpec:
    return build_spec(form(**given), name="train", script="train.py")


def faults(**given: Any) -> dict[str, str]:
    """Return what is allowed instead, by the field of the fault."""
    with pytest.raises(InvalidInput) as refused:
        spec(**given)
    return {fault.where: fault.allowed or "" for fault in refused.value.faults}


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"memory": "8GiB"}, "memory_bytes", 8 << 30),
        ({"memory": "1.5 gb"}, "memory_bytes", 1_500_000_000),
        ({"memory_bytes": 17}, "memory_bytes", 17),
        ({"disk": "20MiB"}, "disk_bytes", 20 << 20),
        ({"gpu_memory": "16GiB"}, "gpu_memory_bytes", 16 << 30),
        ({"gpu_share": 0.25}, "gpu_milli", 250),
        ({"gpu_share": "12.5%"}, "gpu_milli", 125),
        ({"gpu_share": "1"}, "gpu_milli", 1000),
        ({"gpu_profile": "1g.18gb"}, "gpus", 1),
        ({"gpu_model": "H200"}, "gpu_models", {"H200"}),
        ({"gpu_models": ["H200", "H100"], "gpus": 2}, "gpus", 2),
        ({"processes": "2:4", "framework": "torch"}, "processes", 4),
        ({"processes": "2:4", "framework": "torch"}, "processes_min", 2),
        ({"processes": "3"}, "processes", 3),
        (
            {"roles": "worker=2,ps=1", "framework": "tensorflow"},
            "roles",
            {"worker": 2, "ps": 1},
        ),
        ({"roles": {"worker": 2}, "framework": "tensorflow", "processes": 2}, "roles", {"worker": 2}),
        ({"timeout": "90m"}, "timeout", timedelta(minutes=90)),
        ({"timeout": timedelta(hours=1)}, "timeout", timedelta(hours=1)),
        ({"timeout": "PT30S"}, "timeout", timedelta(seconds=30)),
        ({"hang_after": "10m"}, "hang_after", timedelta(minutes=10)),
        ({"preempt": False}, "preemptible", False),
        (
            {"dataset": ["training=churn@3", "risk/outcomes"]},
            "inputs",
            {"training": "churn@3", "outcomes": "risk/outcomes"},
        ),
        ({"inputs": {"training": "churn"}}, "inputs", {"training": "churn"}),
        ({"secret": ["DB=db", "API=secret:api"]}, "secrets", {"DB": "db", "API": "secret:api"}),
        ({"env": ["A=", "B=x=y"]}, "env", {"A": "", "B": "x=y"}),
        ({"args": ["--epochs", 3]}, "args", ("--epochs", "3")),
        ({"queue": "risk", "priority": "-5"}, "priority", -5),
        ({"priority": "high"}, "priority", 1000),
        ({"priority": "low"}, "priority", -1000),
    ],
    ids=str,
)
def test_a_field_is_read_as_people_write_it(given: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(spec(**given), field) == value


def test_affinity_fields_may_be_flat_or_nested() -> None:
    flat = spec(pool="a,b", label=["fast"], avoid="old", near="x", apart="y", spread=True, island="rdma")
    inside = {"pools": ["a", "b"], "labels": ["fast"], "avoid": "old", "near": "x", "apart": "y"}

    together = spec(affinity=inside | {"spread": True, "island": "rdma"})

    assert flat == together
    assert flat.affinity.pools == {"a", "b"}


@pytest.mark.parametrize(
    ("given", "where", "allowed"),
    [
        ({"memory": 8}, "memory", "a number followed by KiB"),
        ({"memory": "8"}, "memory", "a number followed by KiB"),
        ({"memory": "0GiB"}, "memory", "a number followed by KiB"),
        ({"memory": "-1GiB"}, "memory", "a number followed by KiB"),
        ({"memory": "99999999TiB"}, "memory", "a number followed by KiB"),
        ({"memory": None}, "memory", "a value"),
        ({"memory": "1GiB", "memory_bytes": 5}, "memory_bytes", "either memory or memory_bytes"),
        ({"priority": "higher"}, "priority", "low, normal, high, urgent"),
        ({"gpu_share": 0}, "gpu_share", "a part of one GPU"),
        ({"gpu_share": 1.5}, "gpu_share", "a part of one GPU"),
        ({"gpu_share": "1/4"}, "gpu_share", "a part of one GPU"),
        ({"gpu_share": "nan"}, "gpu_share", "a part of one GPU"),
        ({"gpu_share": 0.00001}, "gpu_share", "a part of one GPU"),
        ({"gpu_share": 0.5, "gpus": 2}, "the job", "500 thousandths are of 1 whole GPU"),
        ({"gpu_memory": "1GiB", "gpus": 0}, "gpu_memory", "at least 1 GPU"),
        ({"gpu_model": "H200", "gpus": 0}, "the job", "gpu_models and gpu_profile are for"),
        ({"gpus": -1}, "gpus", "at least 0"),
        ({"gpus": True}, "gpus", "a whole number"),
        ({"cpus": 1.5}, "cpus", "a whole number"),
        ({"processes": "4:2"}, "processes", "a count, or the fewest"),
        ({"processes": "0:2"}, "processes", "a count, or the fewest"),
        ({"processes": "many"}, "processes", "a whole number"),
        ({"roles": "worker"}, "roles", "roles, each once"),
        ({"roles": "worker=1,worker=2"}, "roles", "roles, each once"),
        ({"timeout": "soon"}, "timeout", "a number followed by s, m, h or d"),
        ({"timeout": "0s"}, "timeout", ""),
        ({"hang_after": 5}, "hang_after", "a number followed by s, m, h or d"),
        ({"framework": "caffe"}, "framework", "'plain'"),
        ({"island": "ethernet"}, "island", "'nvlink' or 'rdma'"),
        ({"near": "x", "apart": "x"}, "affinity", "x cannot be both wanted and avoided"),
        ({"pool": "Not A Pool"}, "pool", "a name is"),
        ({"env": ["A"]}, "env", "K=V"),
        ({"env": {"FALAJ_JOB": "x"}}, "env.FALAJ_JOB", "not one of FALAJ_…"),
        ({"secret": "DB"}, "secret", "VARIABLE=NAME"),
        ({"secret": "DB=db", "env": ["DB=x"]}, "the job", "DB cannot be both"),
        ({"secrets": {"DB": "Not a name"}}, "secrets.DB", "a reference is"),
        ({"dataset": 5}, "dataset", "names and values"),
        ({"args": "--epochs 3"}, "args", "a list of words"),
        ({"args": [["a"]]}, "args", "a list of words"),
        ({"args": 5}, "args", "a list of words"),
        ({"gpu_share": "1e999999999"}, "gpu_share", "a part of one GPU"),
        ({"inputs": {"a": "b"}, "dataset": "c=d"}, "dataset", "one of the two"),
        ({"workspace": 5}, "workspace", "the workspace, a word"),
        ({"args": ["\0"]}, "args", ""),
        ({"name": "No Name"}, "name", "a name is"),
        ({"color": "red"}, "color", "one of"),
        ({"module": "falaj.x"}, "module", "one of"),
        ({"affinity": {"color": "red"}}, "affinity.color", "one of"),
        ({"affinity": "near"}, "affinity", "one of"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_where_it_was_given(given: dict[str, Any], where: str, allowed: str) -> None:
    found = faults(**given)

    assert list(found) == [where]
    assert allowed in found[where]


def test_all_faults_are_named_at_once() -> None:
    found = faults(memory="8", gpu_share=2, cpus=0, quue="x", env={"a-b": "x"}, timeout="1 day")

    assert found.keys() == {"memory", "gpu_share", "cpus", "quue", "env.a-b", "timeout"}


def test_a_misspelled_field_gets_the_nearest_name_as_suggestion() -> None:
    with pytest.raises(InvalidInput) as refused:
        spec(quue="risk")

    assert refused.value.faults[0].fix == "queue, if that is meant"


def test_an_unknown_field_without_a_near_name_gets_no_suggestion() -> None:
    with pytest.raises(InvalidInput) as refused:
        spec(resources={"cpus": 2})

    assert refused.value.faults[0].fix == "remove this field"


def test_options_override_the_file_and_add_to_its_variables() -> None:
    file = form(memory_bytes=5, gpus=1, env={"A": "1", "B": "2"}, pools=["slow"], processes="2:4")

    both = form(memory="1KiB", env=["B=3", "C=4"], pool="fast", processes=1).over(file)

    made = build_spec(both, name="train", script="train.py")
    assert (made.memory_bytes, made.gpus, made.affinity.pools) == (1024, 1, {"fast"})
    assert (made.processes, made.processes_min) == (1, None)
    assert made.env == {"A": "1", "B": "3", "C": "4"}


@pytest.mark.parametrize("text", ["", "GiB", "8 GiBs", "8G", "1e3MB", "0x10KB", "٣MB", "1.2.3MB", None, 5])
def test_an_invalid_size_is_none(text: object) -> None:
    assert read_size(text) is None


@pytest.mark.parametrize("count", [1, 1023, 1024, 1 << 20, 3 << 30, (5 << 40) + 1])
def test_a_size_is_spelled_exactly(count: int) -> None:
    assert read_size(spell_size(count)) == count


@pytest.mark.parametrize("nodes", [2, "2"])
def test_roles_over_nodes_give_the_processes_of_each(nodes: Any) -> None:
    found = spec(framework="tensorflow", nodes=nodes, roles="chief=1,worker=2,ps=1")

    assert (found.nodes, found.processes) == (2, 2)


def test_roles_that_do_not_divide_among_the_nodes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="not valid") as refused:
        spec(framework="tensorflow", nodes=2, roles="chief=1,worker=2")

    assert "roles count the processes of all nodes" in str(refused.value.faults)
