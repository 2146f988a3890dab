"""The templates of launch/ and docker/: they keep to their schemas, agree with the package, and the pods of Kubernetes train."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from dist_train import __version__
from dist_train.config import check
from dist_train.config.compose import compose
from dist_train.config.schema import Config
from dist_train.launcher.environment import NodePlace, Place, detect, detect_node
from dist_train.launcher.report import BAD_INPUT, LOST, PREEMPTED
from tests.launcher.jobs import job
from tests.launcher.test_train import TOY, steps

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "launch" / "kubernetes"
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE = ROOT / "docker" / "compose.yaml"
END_SECONDS = 10  # what a container needs between the last save and its end


def tool(name: str) -> str:
    found = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    assert found, f"{name} is not installed: make setup"
    return found


def lint(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return re.match(rb"#!.*\b(ba)?sh\b", file.readline()) is not None


FOLDERS = ("launch", "docker", "tests/cluster", ".ci")
SCRIPTS = sorted(path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file() and is_script(path))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_scripts_are_clean(script: Path) -> None:
    lint(tool("shellcheck"), script)


def test_the_dockerfile_is_clean_and_carries_the_version_of_the_package() -> None:
    lint(tool("hadolint"), DOCKERFILE)
    assert f"\nARG VERSION={__version__}\n" in DOCKERFILE.read_text()


def test_what_the_image_copies_is_in_the_build_context_and_built_libraries_are_not() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    names = {name for words in copied for name in words.split()}
    assert names == kept and all((ROOT / name).exists() for name in names)
    assert "**/*.so" in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_compose_file_keeps_to_its_schema_and_its_two_nodes_meet() -> None:
    lint(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", COMPOSE)
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    for node, (name, service) in enumerate(services.items()):
        assert detect_node(service["environment"]) == NodePlace(node, len(services), next(iter(services)), 29500), name
        config = composed([re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in service["command"]])
        assert config.launch.nodes == len(services)
        assert float(service["stop_grace_period"].removesuffix("s")) >= config.launch.grace_seconds + END_SECONDS
        check.require(config, 4)


def composed(command: list[str]) -> Config:
    assert command[0] == "train"
    return compose(command[1:])


def documents(name: str) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all((KUBERNETES / name).read_text())}


def containers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every pod specification and its container."""
    pods = [documents("job.yaml")["Job"]["spec"]["template"]["spec"]]
    pods += [each["template"]["spec"] for each in replicas().values()]
    for pod in pods:
        (container,) = pod["containers"]
        yield pod, container


def replicas() -> dict[str, dict[str, Any]]:
    return documents("pytorchjob.yaml")["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]


def test_the_job_and_its_service_keep_to_kubernetes_schemas() -> None:
    found = documents("job.yaml")
    assert set(found) == {"Service", "Job"}
    for document in found.values():
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_pytorchjob_has_what_its_operator_looks_for_and_its_pods_keep_to_the_schema() -> None:
    found = documents("pytorchjob.yaml")["PyTorchJob"]
    assert (found["apiVersion"], set(found), set(found["spec"])) == (
        "kubeflow.org/v1", {"apiVersion", "kind", "metadata", "spec"}, {"runPolicy", "pytorchReplicaSpecs"},
    )  # fmt: skip
    assert set(found["spec"]["runPolicy"]) == {"backoffLimit", "cleanPodPolicy"}
    assert set(replicas()) == {"Master", "Worker"} and replicas()["Master"]["replicas"] == 1
    for each in replicas().values():
        assert set(each) == {"replicas", "restartPolicy", "template"} and each["restartPolicy"] == "OnFailure"
        assert each["template"]["spec"]["containers"][0]["name"] == "pytorch"
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": each["template"]["metadata"], "spec": each["template"]["spec"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_a_failed_pod_is_retried_where_that_helps_and_only_there() -> None:
    spec = documents("job.yaml")["Job"]["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy demands it"
    (name,) = [each["name"] for each in spec["template"]["spec"]["containers"]]
    told = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            assert (rule["onExitCodes"]["containerName"], rule["onExitCodes"]["operator"]) == (name, "In")
            told |= dict.fromkeys(rule["onExitCodes"]["values"], rule["action"])
    assert told == {BAD_INPUT: "FailJob", PREEMPTED: "Ignore", LOST: "Ignore"}


def test_pods_are_given_time_to_save_shared_memory_one_run_folder_and_no_privileges() -> None:
    for pod, container in containers():
        config = composed(container["args"])
        check.require(config, config.mesh.dp)
        assert pod["terminationGracePeriodSeconds"] >= config.launch.grace_seconds + END_SECONDS
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in volumes[mounts["/runs"]] and Path(config.run.dir).is_relative_to("/runs")
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert "\nUSER 10001:10001\n" in DOCKERFILE.read_text()


def test_there_is_a_gpu_for_each_rank() -> None:
    spec = documents("job.yaml")["Job"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"]) * spec["completions"]
    assert composed(container["args"]).mesh.dp == gpus
    gpus = 0
    for each in replicas().values():
        gpus += each["replicas"] * int(each["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert composed(replicas()["Master"]["template"]["spec"]["containers"][0]["args"]).mesh.dp == gpus


def job_pods() -> list[dict[str, str]]:
    """The environment of each pod as the Job controller would set it: completion index in an annotation and in a variable."""
    spec = documents("job.yaml")["Job"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"]
    (container,) = spec["template"]["spec"]["containers"]
    pods = []
    for index in range(spec["completions"]):
        fields = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index)}
        env = {"JOB_COMPLETION_INDEX": str(index)}
        for each in container["env"]:
            env[each["name"]] = each["value"] if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        pods.append(env)
    return pods


def pytorchjob_pods() -> list[dict[str, str]]:
    """The environment of each pod as the training operator sets it."""
    count = sum(each["replicas"] for each in replicas().values())
    name = documents("pytorchjob.yaml")["PyTorchJob"]["metadata"]["name"]
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": f"{name}-master-0", "MASTER_PORT": "23456"}
    return [{**common, "RANK": str(rank)} for rank in range(count)]


def test_the_pods_of_the_job_know_their_places_and_meet_at_the_name_of_the_first() -> None:
    found = documents("job.yaml")
    service, name = found["Service"], found["Job"]["metadata"]["name"]
    pod = found["Job"]["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": name}, "the label that the Job controller gives its pods"
    assert pod["subdomain"] == service["metadata"]["name"]
    (port,) = [each["port"] for each in service["spec"]["ports"]]
    nodes = composed(pod["containers"][0]["args"]).launch.nodes
    first = f"{name}-0.{pod['subdomain']}"  # a pod of an indexed Job has the host name JOB-INDEX
    assert [detect_node(env) for env in job_pods()] == [NodePlace(node, nodes, first, port) for node in range(nodes)]


def test_the_pods_of_the_pytorchjob_join_as_ranks() -> None:
    assert [detect(env) for env in pytorchjob_pods()] == [
        Place("torchrun", rank, 2, None, None, "dist-train-master-0", 23456) for rank in range(2)
    ]


def test_the_pods_of_the_job_train_on_this_machine_with_their_own_environment_and_command(tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{found.getsockname()[1]}"
    pods = [{**env, "DIST_TRAIN_RENDEZVOUS": meeting} for env in job_pods()]
    (container,) = documents("job.yaml")["Job"]["spec"]["template"]["spec"]["containers"]
    smaller = [word for word in container["args"] if not word.startswith(("model=", "precision=", "mesh.dp="))]
    arguments = dict(word.split("=", 1) for word in [*smaller[1:], *TOY, "train.steps=3"])
    arguments |= {"run.dir": str(tmp_path / "run"), "data.cache_dir": str(tmp_path / "tokens"), "mesh.dp": "2"}
    command = ["train", *(f"{key}={value}" for key, value in arguments.items())]
    with ExitStack() as stack:
        running = [stack.enter_context(job(tmp_path, *command, env={**env})) for env in pods]
        for each in running:
            assert each.wait(100) == 0, "\n".join(pod.text() for pod in running)
    assert steps(tmp_path / "run") == [1, 2, 3]
