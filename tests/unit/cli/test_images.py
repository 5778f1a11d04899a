"""`falaj images`: what it prints, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import CommandLine, command_line
from falaj.apps.cli.commands import images
from falaj.assembly.images.build import ImageRequest
from falaj.assembly.images.programs import Report
from falaj.records.record import utc_now
from falaj.records.training.images import ImageBuild

DIGEST = f"sha256:{'a' * 64}"


@pytest.fixture
def falaj(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys) as made:
        yield made


def built(request: ImageRequest, report: Report) -> ImageBuild:
    """Return a build as if it had been made."""
    report("building")
    return ImageBuild(
        reference=request.reference,
        digest=DIGEST,
        kind=request.kind,
        version="0.1.0",
        python="3.11",
        base="debian bookworm",
        environment=None if request.environment is None else request.environment.name,
        packages=("demo==1.0", "falaj==0.1.0"),
        size_bytes=70 << 20,
        builder="none",
        archive=None if request.output is None else str(request.output.absolute()),
        built_at=utc_now(),
        took_s=2.0,
    )


def test_the_dockerfile_is_printed_or_is_a_field(falaj: CommandLine) -> None:
    text = falaj.done("images", "render", "platform").out
    made = falaj.done("images", "render", "platform", "--json").json

    assert 'CMD ["falaj", "up"]' in text
    assert made["dockerfile"] == text
    assert made["context"] == [
        *("Dockerfile", "base.tar", "wheels/", "requirements.txt", "pip/", "passwd", "group")
    ]


def test_a_build_says_how_to_use_it_and_is_listed(
    falaj: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "build_image", built)
    falaj.done("init", "--bare", "--home", falaj.home)
    target = tmp_path / "a file.tar"

    ran = falaj.done("images", "build", "--environment", tmp_path / "My Env.txt", "--output", target)

    assert f"digest {DIGEST}" in ran.out
    assert f"images import '{target}'" in ran.out
    assert f'environments.my-env = "localhost/falaj-worker@{DIGEST}"' in ran.out
    assert "--environment my-env" in ran.out
    assert "building localhost/falaj-worker" in ran.err
    (listed,) = falaj.done("images", "list", "--json").json
    assert (listed["digest"], listed["packages"]) == (DIGEST, ["demo==1.0", "falaj==0.1.0"])
    assert "My Env.txt" in falaj.done("images", "list").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "model"], "platform, worker, server"),
        (["build", "--tag", "worker:1"], "HOST/NAME:TAG"),
        (["build", "--builder", "kaniko", "--output", "x.tar", "--base", "python:3.11-slim"], "auto, podman"),
        (["build", "--base", "python", "--output", "x.tar"], "a tag other than latest"),
        (["render", "--output", "/"], "/ exists"),
        (["build", "--url", "http://localhost:1"], "--url does not name one"),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(
    falaj: CommandLine, arguments: list[str], words: str
) -> None:
    ran = falaj("images", *arguments)

    assert ran.status == (1 if "exists" in words else 2)
    assert words in ran.err
