"""Metrics of all replicas from any of them, whose counters never go backwards."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from falaj.apps.byte_shares import ByteShares
from falaj.apps.model_server.metrics import ServerMetrics
from falaj.apps.model_server.replica_metrics import ReplicaMetrics, labelled, read_families, write_families


def server(folder: Path, name: str, *, requests: int, connections: int = 0) -> ServerMetrics:
    """Return the metrics of a replica that has answered so many requests."""
    made = ServerMetrics(ByteShares(1))
    made.peers = ReplicaMetrics(folder, name)
    made.connections = connections
    for _ in range(requests):
        made.of_version("shop", "1").count(200, 0.001)
    return made


def values(text: bytes, name: str) -> dict[str, float]:
    """Return the samples of a metric by replica."""
    found = text_string_to_metric_families(text.decode())
    return {
        each.labels["replica"]: each.value for family in found for each in family.samples if each.name == name
    }


def test_any_replica_shows_all(tmp_path: Path) -> None:
    first, second = server(tmp_path, "1", requests=3), server(tmp_path, "2", requests=5)
    second.store()

    text = first.render()

    assert values(text, "falaj_serving_requests_total") == {"1": 3, "2": 5}
    assert values(text, "falaj_serving_seconds_count") == {"1": 3, "2": 5}
    assert text.count(b"# TYPE falaj_serving_requests_total counter") == 1
    assert [each.replica for each in first.load().replicas] == ["0", "0"]  # this process is both


def test_a_successor_continues_the_counters(tmp_path: Path) -> None:
    first = server(tmp_path, "1", requests=3, connections=7)
    assert values(first.render(), "falaj_serving_requests_total") == {"1": 3}  # is then in the file, too

    successor = server(tmp_path, "1", requests=0)

    assert values(successor.render(), "falaj_serving_requests_total") == {"1": 3}
    assert values(successor.render(), "falaj_serving_connections") == {"1": 0}
    successor.of_version("shop", "1").count(200, 0.001)
    successor.render()
    assert values(successor.render(), "falaj_serving_requests_total") == {"1": 4}
    assert values(successor.render(), "falaj_serving_seconds_count") == {"1": 4}


def test_counters_of_an_ended_replica_stay_and_its_gauges_go(tmp_path: Path) -> None:
    first, second = server(tmp_path, "1", requests=3), server(tmp_path, "2", requests=5, connections=9)
    second.store()
    os.utime(tmp_path / "2.json", (0, 0))

    text = first.render()

    assert values(text, "falaj_serving_requests_total") == {"1": 3, "2": 5}
    assert values(text, "falaj_serving_connections") == {"1": 0}
    assert len(first.load().replicas) == 1


def test_a_damaged_file_or_a_full_disk_hides_nothing_else(tmp_path: Path) -> None:
    first = server(tmp_path, "1", requests=3)
    (tmp_path / "2.json").write_text('{"text": "# TYPE a')
    (tmp_path / "3.json").write_text("[]")
    (tmp_path / "4.json").write_text('{"text": "a b", "load": ""}')
    (tmp_path / "1.new").mkdir()  # nothing can be written

    assert values(first.render(), "falaj_serving_requests_total") == {"1": 3}


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_values_of_labels_are_left_alone(value: str) -> None:
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    line = f'a_total{{x="{escaped}"}} 2.0'
    text = f"# TYPE a_total counter\n{line}\n"

    assert write_families(read_families(text)) == text
    assert labelled(line, "1").endswith(f'x="{escaped}"}} 2.0')
