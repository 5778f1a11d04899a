"""A canary that ends before its verdict, under a real controller: the requests go back to the champion."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from falaj.control.controller import Controller
from falaj.drivers.dbos.workflows import DbosWorkflows
from falaj.governance.operations.caller import acting_as, start_thread
from falaj.records.control.workflows import WorkflowRun, WorkflowState
from falaj.records.governance.identity import Role
from falaj.records.serving import Route
from model_files import onnx
from platforms import OwnPlatform, make_platform
from polling import eventually


@pytest.fixture
def ready(tmp_path: Path) -> Iterator[OwnPlatform]:
    """A platform with an endpoint that is served by version 1; there are three."""
    with make_platform(tmp_path) as made:
        for _ in range(3):
            blob = made.blobs.upload(iter([onnx()]))
            made.models.register("churn", files=(blob.id,), paths=("model.onnx",))
        made.endpoints.deploy("churn", model="churn@1")
        yield made


@contextmanager
def controlled(platform: OwnPlatform, tmp_path: Path) -> Iterator[None]:
    parts, stop = platform.parts, threading.Event()

    def engine() -> DbosWorkflows:
        return DbosWorkflows(f"sqlite:///{tmp_path}/workflows.db")

    controller = Controller(parts.gate, parts.services, engine, holder="test")
    thread = start_thread(controller.run, stop, name="controller")
    try:
        yield
    finally:
        stop.set()
        thread.join(20)


def weights(platform: OwnPlatform) -> dict[str, int]:
    return {route.version: route.weight for route in platform.endpoints.show("churn").routes}


def ended(platform: OwnPlatform, work: WorkflowRun) -> WorkflowRun:
    def look() -> WorkflowRun | None:
        found = platform.workflows.show(work.id)
        return found if found.state.ended else None

    return eventually(look, within=20)


def test_a_cancelled_canary_goes_back_to_the_champion(ready: OwnPlatform, tmp_path: Path) -> None:
    with controlled(ready, tmp_path):
        work = ready.pipelines.canary("churn", model="churn@2")
        eventually(lambda: weights(ready) == {"1": 90, "2": 10}, within=20)

        ready.workflows.cancel(work.id)
        found = ended(ready, work)

    assert found.state is WorkflowState.CANCELLED
    assert weights(ready) == {"1": 100}


def test_cancelled_while_no_controller_runs_it_goes_back_too(ready: OwnPlatform, tmp_path: Path) -> None:
    with controlled(ready, tmp_path):
        work = ready.pipelines.canary("churn", model="churn@2")
        eventually(lambda: weights(ready) == {"1": 90, "2": 10}, within=20)
    ready.workflows.cancel(work.id)

    with controlled(ready, tmp_path):
        found = ended(ready, work)

    assert found.state is WorkflowState.CANCELLED
    assert weights(ready) == {"1": 100}


def test_a_canary_whose_owner_is_gone_goes_back_too(ready: OwnPlatform, tmp_path: Path) -> None:
    dana = ready.join("dana", Role.DEVELOPER)
    with controlled(ready, tmp_path):
        with acting_as(dana):
            work = ready.pipelines.canary("churn", model="churn@2")
        eventually(lambda: weights(ready) == {"1": 90, "2": 10}, within=20)

        ready.users.disable("dana")
        ended(ready, work)

    assert weights(ready) == {"1": 100}


def test_of_two_canaries_on_one_endpoint_the_second_is_refused(ready: OwnPlatform, tmp_path: Path) -> None:
    with controlled(ready, tmp_path):
        first = ready.pipelines.canary("churn", model="churn@2")
        eventually(lambda: weights(ready) == {"1": 90, "2": 10}, within=20)
        second = ended(ready, ready.pipelines.canary("churn", model="churn@3"))
        still = weights(ready)
        ready.workflows.cancel(first.id)
        ended(ready, first)

    assert (second.state, still) == (WorkflowState.FAILED, {"1": 90, "2": 10})
    assert "another canary is under way" in (second.error or "")
    assert weights(ready) == {"1": 100}


def test_routes_that_a_person_sets_end_the_canary_and_stay(ready: OwnPlatform, tmp_path: Path) -> None:
    with controlled(ready, tmp_path):
        work = ready.pipelines.canary("churn", model="churn@2")
        eventually(lambda: weights(ready) == {"1": 90, "2": 10}, within=20)
        ready.endpoints.route("churn", routes=(Route(version="3"),))
        found = ended(ready, work)

    assert found.result is not None
    assert "changed by someone else" in found.result["verdict"]["words"]
    assert weights(ready) == {"3": 100}
