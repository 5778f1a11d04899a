"""Volumes of jobs: what an administrator lists is found by name, and nothing else, where residency permits it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from falaj.assembly.config import read_config
from falaj.control.jobs.volumes import cluster_volumes, machine_volumes
from falaj.errors import ConfigInvalid, Conflict, InvalidInput, ResidencyDenied
from falaj.ports.launcher import AttemptState, Launch, VolumeMount
from falaj.records.config import ClusterVolume, MachineVolume
from falaj.records.governance.residency import UNRESTRICTED, Label
from falaj.records.training.jobs import JobState
from falaj.sdk.job_request import build_spec, parse_job_request
from falaj.training.inputs import require_volume_zones
from job_harness import DONE, JobHarness
from platforms import TWO_ZONES, make_platform
from polling import eventually


def data(folder: Path, **settings: object) -> MachineVolume:
    folder.mkdir(exist_ok=True)
    return MachineVolume.model_validate({"folder": folder, "workspaces": ["default"]} | settings)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('[jobs.volumes.a]\nfolder = "data"\nworkspaces = ["default"]', "a folder, from / on"),
        ('[jobs.volumes.a]\nfolder = "/data/../etc"\nworkspaces = ["default"]', "a folder, from / on"),
        ('[jobs.volumes.a]\nfolder = "/data"', "workspaces"),
        ('[jobs.volumes.a]\nfolder = "/data"\nworkspaces = ["default"]\nread_only = false', "read_only"),
        ('[kubernetes.volumes.a]\nclaim = "Data"\nworkspaces = ["default"]', "PersistentVolumeClaim"),
        ('[kubernetes.volumes.a]\nclaim = "a"\npath = "../b"\nworkspaces = ["default"]', "no '..'"),
        ('[kubernetes.volumes.a]\nclaim = "a"\npath = "/b"\nworkspaces = ["default"]', "no '..'"),
        (
            '[kubernetes.volumes.a]\nclaim = "a"\nworkspaces = ["default"]\nzone = "moon"',
            "kubernetes.volumes.a is in zone moon",
        ),
        (TWO_ZONES + '[jobs.volumes.a]\nfolder = "/data"\nworkspaces = ["default"]', "names no zone"),
        ("[kubernetes.scratch]\nsize = 5", "1048576"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, toml: str, words: str) -> None:
    (tmp_path / "falaj.toml").write_text(toml)

    with pytest.raises(ConfigInvalid) as refused:
        read_config(tmp_path / "falaj.toml")

    assert words in str(refused.value)


def test_a_volume_is_for_the_workspaces_that_it_lists(tmp_path: Path) -> None:
    volumes = {"images": data(tmp_path / "images"), "risk": data(tmp_path / "risk", workspaces=["risk"])}

    assert machine_volumes(volumes, ["images"], "default")[0].folder == tmp_path / "images"
    for name in ("risk", "nothing"):
        with pytest.raises(InvalidInput) as refused:
            machine_volumes(volumes, [name], "default")
        (fault,) = refused.value.faults
        assert (fault.given, fault.allowed) == (name, "images")
        assert 'workspaces = ["default"]' in str(fault.fix)
    (tmp_path / "images").rmdir()
    with pytest.raises(InvalidInput, match=r"jobs\.volumes\.images"):
        machine_volumes(volumes, ["images"], "default")


def test_a_claim_can_be_shared_by_volumes_that_show_different_folders_of_it() -> None:
    volumes = {
        name: ClusterVolume(claim="data", workspaces=frozenset({"default"}), path=name, read_only=name != "b")
        for name in ("a", "b")
    }

    found = cluster_volumes(volumes, ["a", "b"], "default")

    assert [(each.name, each.claim, each.path, each.read_only) for each in found] == [
        ("a", "data", "a", True),
        ("b", "data", "b", False),
    ]


def test_volumes_are_given_as_words_or_a_list() -> None:
    for given in ({"volume": ["a", "b"]}, {"volumes": "a,b"}):
        request = parse_job_request(given, place=lambda at: at[-1])

        assert build_spec(request, name="x", script="train.py").volumes == ("a", "b")
    with pytest.raises(InvalidInput, match="once"):
        build_spec(parse_job_request({"volume": "a,a"}, place=lambda at: at[-1]), name="x", script="train.py")


def test_a_job_is_refused_for_what_it_may_not_use_and_restricted_by_what_it_uses(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    listed = f'folder = "{tmp_path}/images"\nworkspaces = ["default"]\nzone = '
    toml = f'{TWO_ZONES}[jobs.volumes.here]\n{listed}"local"\n[jobs.volumes.there]\n{listed}"frankfurt"\n'
    script = tmp_path / "train.py"
    script.write_text("")
    with make_platform(tmp_path / "home", toml=toml) as platform:
        bound = platform.blobs.upload(iter([b"rows"]), zone="frankfurt", only=("DE",))

        job = platform.train(script, volumes=["here"])

        assert job.spec.volumes == ("here",)
        assert job.label.only == frozenset({"AE"})
        assert platform.train(script).label.only is None
        with pytest.raises(InvalidInput, match="nothing"):
            platform.train(script, volumes=["nothing"])
        with pytest.raises(ResidencyDenied, match="only nowhere"):
            platform.train(script, volumes=["here", "there"])
        with pytest.raises(ResidencyDenied):
            platform.train(script, volumes=["here"], inputs={"rows": bound.id})


def test_a_volume_that_moved_needs_a_new_job(tmp_path: Path) -> None:
    volume = VolumeMount("images", zone="local")
    with make_platform(tmp_path, toml=TWO_ZONES) as platform:
        zones = platform.parts.gate.zones

        require_volume_zones(Label(only=frozenset({"AE"})), [volume], zones)
        with pytest.raises(Conflict, match="submit it again"):
            require_volume_zones(UNRESTRICTED, [volume], zones)
        with pytest.raises(ResidencyDenied, match=r"volume images lies in zone local \(AE\)"):
            require_volume_zones(Label(only=frozenset({"DE"})), [volume], zones)


def test_a_job_finds_its_volumes_by_name_and_may_read_nothing_else_of_them(
    light_harness: JobHarness, tmp_path: Path
) -> None:
    volumes = {"images": data(tmp_path / "images")}
    (tmp_path / "images" / "1.png").write_text("pixels")
    seen = list[tuple[str, list[Path]]]()

    def program(launch: Launch) -> AttemptState:
        found = Path(launch.environment["FALAJ_VOLUMES"]) / "images" / "1.png"
        seen.append((found.read_text(), [*launch.readable]))
        return DONE

    light_harness.launcher.program = program
    light_harness.host = replace(
        light_harness.host, volumes=lambda names, workspace: machine_volumes(volumes, names, workspace)
    )
    job = light_harness.submit(volumes=("images",))
    reconciler = light_harness.reconciler()

    def ended() -> bool:
        reconciler.tick()
        return light_harness.jobs.show(job.id).state.ended

    eventually(ended)

    assert light_harness.jobs.show(job.id).state is JobState.DONE
    ((text, readable),) = seen
    assert text == "pixels"
    assert tmp_path / "images" in readable
