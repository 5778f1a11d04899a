"""A cluster without Kubernetes: each pod is a process of this machine that runs the real worker.

It has what the launcher needs of a cluster, and its state is on disk, so that pods outlive the controller.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "FALAJ_TEST_PODS"


class ProcessCluster:
    """Implements the cluster of the launcher in the folder that FALAJ_TEST_PODS names."""

    def __init__(self, connect: object = None, *, home: str = "home_1") -> None:
        self._folder = Path(os.environ[FOLDER_VARIABLE])
        self._folder.mkdir(parents=True, exist_ok=True)

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        path = self._object(manifest["kind"], manifest["metadata"]["name"])
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text())
            return found
        made = manifest | {"metadata": manifest["metadata"] | {"uid": str(uuid.uuid4())}}
        write(path, made)
        if manifest["kind"] == "Job":
            self._start_pods(manifest["metadata"]["name"])
        return made

    def adopt(self, manifest: dict[str, Any], owner: dict[str, Any]) -> None:
        assert self._object(manifest["kind"], manifest["metadata"]["name"]).exists()

    def find(self, api_version: str, kind: str, name: str, *, namespace: str) -> dict[str, Any] | None:
        path = self._object(kind, name)
        return json.loads(path.read_text()) if path.exists() else None

    def delete(self, api_version: str, kind: str, name: str, *, namespace: str) -> None:
        if self._object(kind, name).exists():
            self._object(kind, name).unlink()
            if kind == "Job":
                self._object("Secret", name).unlink(missing_ok=True)
                for pod in self._folder.glob(f"pod-{name}-*"):
                    self.delete_pod(pod)

    def list_objects(self, api_version: str, kind: str, *, namespace: str) -> list[Any]:
        from falaj.drivers.kubernetes.cluster import FoundObject

        found = [json.loads(path.read_text())["metadata"] for path in self._folder.glob(f"{kind}-*.json")]
        return [
            FoundObject(each["name"], each["annotations"]) for each in found if each["namespace"] == namespace
        ]

    def explain(self, name: str, *, namespace: str) -> str | None:
        return None

    def served_groups(self) -> frozenset[str]:
        return frozenset()

    def close(self) -> None:
        pass

    def is_current(self) -> bool:
        return True

    def lacks_room(self) -> bool:
        return False

    def pods(self, attempt: str) -> list[Any]:
        from falaj.drivers.kubernetes.pod_status import pod_facts

        found = []
        for path in self._folder.glob("pod-*/pod.json"):
            with suppress(FileNotFoundError):
                found.append(pod_facts(json.loads(path.read_text())))
        return [each for each in found if each.attempt == attempt]

    # ------------------------------------------------------------------------------------------ for tests

    def pod_folders(self) -> list[Path]:
        return sorted(self._folder.glob("pod-*"))

    def start_pod(self, name: str, rank: int = 0) -> Path:
        """Start one more pod of a job's node, as a controller that made a mistake would."""
        job = json.loads(self._object("Job", name).read_text())
        secret = json.loads(self._object("Secret", name).read_text())["stringData"]
        return self._start_pod(job, rank, secret)

    def delete_pod(self, pod: Path) -> None:
        """Tell a pod to end, and forget it when it has."""
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((pod / "pid").read_text()), signal.SIGTERM)

    def _start_pods(self, name: str) -> None:
        for rank in range(json.loads(self._object("Job", name).read_text())["spec"]["completions"]):
            self.start_pod(name, rank)

    def _start_pod(self, job: dict[str, Any], rank: int, secret: Mapping[str, str]) -> Path:
        uid, name = str(uuid.uuid4()), job["metadata"]["name"]
        folder = self._folder / f"pod-{name}-{rank}-{uid[:5]}"
        for part in ("falaj", "credentials"):
            (folder / part).mkdir(parents=True)
        for key, value in secret.items():
            (folder / "credentials" / key).write_text(value)
        template = job["spec"]["template"]
        notes = template["metadata"]["annotations"] | {"batch.kubernetes.io/job-completion-index": str(rank)}
        pod = {
            "metadata": {"uid": uid, "annotations": notes, "name": folder.name},
            "status": {"phase": "Running", "containerStatuses": [image_status(template)]},
        }
        write(folder / "pod.json", pod)
        container = template["spec"]["containers"][0]
        environment = {"FALAJ_TERMINATION_LOG": str(folder / "message"), "PATH": os.environ["PATH"]}
        if (folder.parent / "python").is_dir():  # what all pods import first, such as another clock
            environment["PYTHONPATH"] = str(folder.parent / "python")
        for each in container["env"]:
            environment[each["name"]] = value_of(each, uid, rank, folder)
        command = [sys.executable, *container["command"][1:]]
        write(folder / "run.json", {"command": command, "environment": environment})
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, __file__, str(folder)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        (folder / "pid").write_text(str(process.pid))
        process.returncode = 0  # it is left to itself, as a pod is
        return folder

    def _object(self, kind: str, name: str) -> Path:
        return self._folder / f"{kind}-{name}.json"


def value_of(variable: Mapping[str, Any], uid: str, rank: int, folder: Path) -> str:
    if "valueFrom" in variable:
        return uid if variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.uid" else str(rank)
    value = str(variable["value"])
    for mount, there in {"/var/run/falaj": folder / "credentials", "/falaj": folder / "falaj"}.items():
        if value.startswith(mount):
            return f"{there}{value.removeprefix(mount)}"
    return value


def image_status(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status of a container that runs, with the digest that its image is given here."""
    name = template["spec"]["containers"][0]["image"].partition("@")[0].rpartition(":")[0]
    return {"name": "node", "imageID": f"{name}@sha256:{'5' * 64}", "state": {"running": {}}}


def write(path: Path, content: Any) -> None:
    draft = path.with_name(f".{path.name}.{time.monotonic_ns()}")
    draft.write_text(json.dumps(content))
    draft.rename(path)


def run_pod(folder: Path) -> None:
    """Be the kubelet of one pod: run its container, forward SIGTERM, and record how it ended."""
    given = json.loads((folder / "run.json").read_text())
    process = subprocess.Popen(given["command"], env=given["environment"])
    ends = []

    def end(*_: object) -> None:
        ends.append(True)
        process.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    code = process.wait()
    if ends:
        (folder / "pod.json").unlink()
        return
    message = (folder / "message").read_text() if (folder / "message").exists() else ""
    ended = {
        "exitCode": code if code >= 0 else 128 - code,
        "message": message,
        "reason": "Error" if code else "Completed",
    }
    pod = json.loads((folder / "pod.json").read_text())
    state = pod["status"]["containerStatuses"][0] | {"state": {"terminated": ended}}
    pod["status"] = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [state]}
    write(folder / "pod.json", pod)


if __name__ == "__main__":
    run_pod(Path(sys.argv[1]))


class ProcessNamespaces:
    """The namespaces of workspaces, which need nothing where pods are processes."""

    def __init__(self, *given: Any, **options: Any) -> None:
        pass

    def ensure_for(self, workspace: str) -> str:
        return f"falaj-{workspace}"

    def forget(self, namespace: str) -> None:
        pass

    def existing(self) -> dict[str, str]:
        return {"falaj-default": "default"}

    def close(self) -> None:
        pass


class ProcessNodes:
    """The inventory of a cluster with one node, which is this machine."""

    fault = None

    def __init__(self, config: Any, *, home: str | None = None) -> None:
        pass

    def begin(self) -> None:
        pass

    def nodes(self) -> list[Any]:
        from falaj.ports.machine.hardware import NodeFacts

        return [NodeFacts(name="node-0", cpus=8, memory_bytes=16 << 30)]

    def close(self) -> None:
        pass
