"""The cluster that the tests run on, as kubectl and its own tool drive it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from polling import PATIENCE_S, let_pass

ADDONS = {
    "JobSet": "jobsets.jobset.x-k8s.io",
    "Kueue": "clusterqueues.kueue.x-k8s.io",
    "Kubeflow Trainer": "trainjobs.trainer.kubeflow.org",
}
"""The definitions by which the addons are recognized."""

MANAGERS = ("jobset-system", "kueue-system", "kubeflow-system")


@dataclass(frozen=True)
class ClusterTestbed:
    """A running cluster. `program` started it in `directory`; both are none for one that KUBECONFIG named."""

    kubeconfig: Path
    directory: Path | None = None
    program: Path | None = None

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """Return what kubectl prints; AssertionError with its error if it fails."""
        done = subprocess.run(
            ["kubectl", *words],
            input=stdin,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": self._path()},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout

    def get(self, *words: str) -> Any:
        """Return the objects that `kubectl get` finds."""
        return json.loads(self.kubectl("get", *words, "--output", "json"))

    def serves(self, addon: str) -> bool:
        """Return whether the definitions of an addon are installed."""
        return ADDONS[addon] in self.kubectl("get", "customresourcedefinitions", "--output", "name")

    def kubeconfig_of(self, namespace: str, account: str, path: Path) -> Path:
        """Write a kubeconfig with a token of a service account, and return its path."""
        found = self.kubectl(
            *("config", "view", "--raw", "--minify", "--flatten", "--output"),
            "jsonpath={.clusters[0].cluster.server} {.clusters[0].cluster.certificate-authority-data}",
        )
        server, authority = found.split()
        token = self.kubectl("create", "token", account, "-n", namespace).strip()
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        cluster = {"name": "c", "cluster": {"server": server, "certificate-authority-data": authority}}
        user = {"name": "u", "user": {"token": token}}
        document = {"current-context": "c", "contexts": [context], "clusters": [cluster], "users": [user]}
        path.write_text(json.dumps(document))
        return path

    def restart(self, component: str) -> None:
        """Kill a component such as kubelet-0 with SIGKILL, and start it again, also where its port is not free yet."""
        for _ in range(10):
            self._run("restart", component)
            let_pass(1)  # it ends at once where its port is not free
            if any(line.split()[:2] == [component, "pid"] for line in self._run("status").splitlines()):
                return
        raise AssertionError(f"{component} does not start again")

    def signal(self, component: str, number: int) -> None:
        """Send a signal to a component such as kubelet-0."""
        lines = [line.split() for line in self._run("status").splitlines()]
        pid = next(int(words[2]) for words in lines if words[:2] == [component, "pid"])
        os.kill(pid, number)

    def load_images(self, *archives: Path) -> None:
        """Import image archives on every node."""
        self._run("load", *map(str, archives))

    def install_addons(self) -> None:
        """Install JobSet, Kueue and Kubeflow Trainer, and wait until they answer."""
        folder = Path(self._programs) / "addons"
        self.load_images(folder / "controllers.tar")
        for names in (("jobset", "kueue"), ("trainer",), ("trainer-runtimes",)):
            files = [word for name in names for word in ("--filename", str(folder / f"{name}.yaml"))]
            self.kubectl("apply", "--server-side", *files)
            for namespace in MANAGERS[: 2 if names[0] == "jobset" else 3]:
                self.kubectl(
                    "wait",
                    "--for=condition=Available",
                    "deployment",
                    "--all",
                    "-n",
                    namespace,
                    "--timeout=90s",
                )

    def _run(self, command: str, *words: str) -> str:
        assert self.program is not None
        assert self.directory is not None
        done = subprocess.run(
            [self.program, command, self.directory, *words],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    @cached_property
    def _programs(self) -> str:
        """The folder with kubectl; empty where it is on the PATH."""
        return "" if self.program is None else self._run("bin")

    def _path(self) -> str:
        return os.pathsep.join(filter(None, [self._programs, os.environ["PATH"]]))
