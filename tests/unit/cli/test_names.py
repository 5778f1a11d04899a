"""Short references, similar names and the completion of names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import falaj as fj
from command_line import CommandLine, command_line, make_template
from falaj.apps.cli import names
from falaj.apps.cli.app import root
from falaj.apps.cli.session import Session
from falaj.sdk.platform import Platform
from polling import PATIENCE_S, let_pass


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with two runs of an experiment, a workspace, two tokens and a blob."""
    folder = make_template(tmp_path_factory.mktemp("template"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALAJ_CONFIG_DIR", str(folder / "config"))
        with fj.open(folder / "home") as platform:
            for name in ("first", "second", "second"):
                with platform.run("churn", name=name) as run:
                    run.log(auc=0.5)
                    run.log(step=1, auc=0.75)
            platform.workspaces.create("risk")
            platform.put("flights", b"bytes")
            for purpose in ("ci", "laptop"):
                platform.tokens.issue(purpose=purpose)
    return folder


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


def ids(falaj: CommandLine) -> list[str]:
    """Return the ids of the runs, newest first."""
    return [each["id"] for each in falaj.json("runs", "list", "churn")["items"]]


# ------------------------------------------------------------------------------------------ short references


def test_last_is_the_newest(falaj: CommandLine) -> None:
    newest, *_ = ids(falaj)

    assert falaj.json("runs", "show", "last")["run"]["id"] == newest
    assert falaj.done("runs", "tag", "last", "kept=yes")
    assert falaj.json("runs", "show", newest)["tags"] == [{"key": "kept", "value": "yes"}]


def test_a_name_is_the_newest_of_that_name(falaj: CommandLine) -> None:
    newest, _, oldest = ids(falaj)

    assert falaj.json("runs", "show", "first")["run"]["id"] == oldest
    ran = falaj.done("runs", "show", "second", "--json")
    assert ran.json["run"]["id"] == newest
    assert ran.err == f"second is {newest}, the newest of 2 of that name\n"


def test_the_beginning_of_an_id_is_enough_if_it_is_one(falaj: CommandLine) -> None:
    newest, *_ = ids(falaj)
    shared = newest[:8]

    assert falaj.json("runs", "show", newest[:-3])["run"]["id"] == newest
    assert falaj.json("runs", "show", newest.partition("_")[2][:-3])["run"]["id"] == newest
    ambiguous = falaj("runs", "show", shared)
    assert ambiguous.status == 2
    assert all(each in ambiguous.err for each in ids(falaj))


def test_last_of_nothing_is_not_found(falaj: CommandLine) -> None:
    ran = falaj("jobs", "show", "last")

    assert (ran.status, "there is no job yet" in ran.err) == (1, True)


@pytest.mark.slow
def test_every_command_that_takes_an_id_takes_last(falaj: CommandLine) -> None:
    """What they say is about the object, or about its kind; none says that there is no object `last`."""
    commands = ["show", "wait", "logs", "explain", "retry", "checkpoints"]
    typed_ids = [*(["jobs", each, "last"] for each in commands), ["jobs", "cancel", "last", "--yes"]]
    for typed in [*typed_ids, ["models", "from-job", "last", "m"]]:
        assert "there is no job yet" in falaj(*typed).err, typed
    assert falaj("workflows", "show", "last").err.startswith("error[object.not_found] there is no work yet")
    assert "laptop" in falaj.done("tokens", "revoke", "last").out


# ---------------------------------------------------------------------------------------------- similar names


@pytest.mark.parametrize(
    ("typed", "similar"),
    [
        ("workspaces show rsk", "did you mean risk?"),
        ("workspaces show defult", "did you mean default?"),
        ("blobs show flihgts", "did you mean flights?"),
        ("runs list chrun", "did you mean churn?"),
        ("runs show secnd", "did you mean second?"),
        ("blobs show default/flihgts", "did you mean default/flights?"),
    ],
)
def test_a_similar_name_is_suggested(falaj: CommandLine, typed: str, similar: str) -> None:
    ran = falaj(*typed.split())

    assert ran.status == 1
    assert similar in ran.err


def test_names_that_are_not_similar_are_not_suggested(falaj: CommandLine) -> None:
    assert "similar" not in falaj("workspaces", "show", "zzz").err


# ------------------------------------------------------------------------------------------------- completion


class LocalSession(Session):
    """A session whose platform runs: the home of the test, in this process."""

    def running_platform(self) -> Platform | None:
        return self.platform()


def completed(kind: str, incomplete: str) -> list[str]:
    ctx: Any = root().make_context("falaj", ["workspaces", "list"], resilient_parsing=True)
    return names.completion_of(kind)(ctx, incomplete)


def test_names_are_completed_from_the_platform(falaj: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    newest, *_ = ids(falaj)
    monkeypatch.setattr("falaj.apps.cli.session.Session", LocalSession)
    monkeypatch.setattr(names, "COMPLETE_S", 60.0)

    assert completed("workspace", "r") == ["risk"]
    assert completed("blob", "fl") == ["flights"]
    assert completed("blob", "default/fl") == ["default/flights"]
    assert completed("run", "la") == ["last"]
    assert completed("run", newest[:-2]) == [newest]
    assert completed("zone", "lo") == ["local"]
    assert completed("nonsense", "") == []


def test_a_home_without_a_platform_completes_nothing_and_says_nothing(
    falaj: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completed("workspace", "r") == []
    assert capsys.readouterr() == ("", "")


def test_a_completion_that_takes_too_long_offers_nothing(
    falaj: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "COMPLETE_S", 0.05)
    answers: list[str] = []

    def answer_late(_session: Session) -> None:
        let_pass(PATIENCE_S)
        answers.append("too late")

    monkeypatch.setattr(Session, "running_platform", answer_late)

    assert completed("workspace", "r") == []
    assert answers == []
