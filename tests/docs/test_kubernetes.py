"""examples/kubernetes: the manifests against Kubernetes' own schema, their names against each other, and
their commands against the command line and the settings."""

from __future__ import annotations

import importlib
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowroll.cli.settings import read_role
from lowroll.runs.roles.run_paths import ADMIN, ENGINE, ENGINE_ROLE, TOKEN
from tests.fixtures.roles import write
from tests.fixtures.runs import settings

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples/kubernetes/lowroll.yaml"
PARTS: list[dict[str, Any]] = list(yaml.safe_load_all(FILE.read_text()))
WORKLOADS = {p["metadata"]["name"]: p for p in PARTS if p["kind"] in ("StatefulSet", "Job")}


def at(tree: Any, path: str) -> Any:
    return reduce(lambda part, key: part[int(key) if key.isdigit() else key], path.split("."), tree)


def container(name: str) -> dict[str, Any]:
    (one,) = at(WORKLOADS[name], "spec.template.spec.containers")
    return dict(one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", PARTS, ids=[p["kind"] + " " + p["metadata"]["name"] for p in PARTS]
)
def test_kubernetes_takes_it(part: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(part, "1.30", strict=True)  # strict: no field that is not known


def test_names_lead_to_what_is_there() -> None:
    by_kind = {(p["kind"], p["metadata"]["name"]): p for p in PARTS}
    assert set(WORKLOADS) == {ENGINE, "orchestrator", "learner"}
    for name, workload in WORKLOADS.items():
        pod = at(workload, "spec.template.spec")
        labels = at(workload, "spec.template.metadata.labels")
        assert labels == {"app": "lowroll", "role": name}
        mounts = {mount["name"] for mount in container(name)["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert mounts == set(volumes)
        claim = at(volumes["run"], "persistentVolumeClaim.claimName")
        assert ("PersistentVolumeClaim", claim) in by_kind
        assert container(name)["envFrom"] == [{"secretRef": {"name": "lowroll"}}]
    engines, service = WORKLOADS[ENGINE], by_kind["Service", ENGINE]
    labels = at(engines, "spec.template.metadata.labels")
    assert at(engines, "spec.serviceName") == at(service, "metadata.name")
    assert at(service, "spec.clusterIP") == "None"  # DNS tells the address of each pod
    policy = by_kind["NetworkPolicy", ENGINE]
    for selector in (at(engines, "spec.selector.matchLabels"), at(service, "spec.selector"),
                     at(policy, "spec.podSelector.matchLabels")):  # fmt: skip
        assert selector == labels
    for name in ("orchestrator", "learner"):
        assert at(WORKLOADS[name], "spec.template.spec.restartPolicy") == "OnFailure"


def test_pods_are_the_engines_of_the_run_folder() -> None:
    (role,) = container(ENGINE)["env"]
    assert (
        role["name"] == ENGINE_ROLE and at(role, "valueFrom.fieldRef.fieldPath") == "metadata.name"
    )
    assert at(WORKLOADS[ENGINE], "metadata.name") == ENGINE  # a pod of it is called engine-0


@pytest.mark.parametrize("name", [ENGINE, "orchestrator", "learner"])
def test_the_commands_are_settings_that_a_run_takes(name: str, tmp_path: Path, model: Path) -> None:
    program, command, file, *words = container(name)["command"]
    assert (program, file) == ("lowroll", "/settings/run.yaml")
    assert command == {ENGINE: "serve", "learner": "train"}.get(name, "orchestrate")
    run = write(settings(model, tmp_path / "run"), tmp_path / "run.yaml")
    module = importlib.import_module(f"lowroll.cli.{command}")
    given = module.parser().parse_intermixed_args([str(run), *words])
    if command == "serve":
        given.settings = [given.model, *given.settings]
    cfg = read_role(command, given)
    assert str(cfg.output_dir) == "/run/lowroll/out"  # one run folder for all
    if command == "serve":
        (port,) = container(name)["ports"]
        assert cfg.serve.port == port["containerPort"] == cfg.client.elastic.port
    if command == "orchestrate":
        assert cfg.client.elastic.hostname == ENGINE
    if command == "train":
        limits = at(container(name), "resources.limits")
        assert cfg.train.gpus == limits["nvidia.com/gpu"] and cfg.ckpt.resume_step == -1


def test_the_head_of_the_file_names_the_secrets_that_roles_read() -> None:
    head = FILE.read_text().partition("apiVersion")[0]
    assert f"--from-literal={TOKEN}=" in head and f"--from-literal={ADMIN}=" in head
