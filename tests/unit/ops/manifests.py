"""What runs the service elsewhere, as the tests beside this read it: manifests by kind, the compose files, their settings."""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from nexus_bus import config

ROOT = Path(__file__).resolve().parents[3]
OPS, SCHEMAS = ROOT / "ops", ROOT / "tests" / "data" / "schemas"
KUBERNETES, COMPOSE = OPS / "kubernetes", OPS / "compose"
FOLDERS = tuple(KUBERNETES / name for name in ("base", "autoscaled", "door", "monitoring"))
WORKERS = sorted({*config.ROLES, "gateway"})

KINDS = {
    "Deployment": "io.k8s.api.apps.v1.Deployment",
    "Service": "io.k8s.api.core.v1.Service",
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "Namespace": "io.k8s.api.core.v1.Namespace",
    "PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
    "PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget",
    "NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
    "ScaledObject": "ScaledObject",
    "ServiceMonitor": "ServiceMonitor",
    "PrometheusRule": "PrometheusRule",
}
FILES = {
    "ScaledObject": "keda-2.json",
    "ServiceMonitor": "prometheus-operator.json",
    "PrometheusRule": "prometheus-operator.json",
}


@functools.cache
def schema(name: str) -> dict[str, Any]:
    return json.loads((SCHEMAS / name).read_text())


def validate(manifest: Mapping[str, Any]) -> None:
    """Raises jsonschema.ValidationError, or KeyError for a kind that nobody has a schema of."""
    whole = schema(FILES.get(manifest["kind"], "kubernetes-1.34.json"))
    jsonschema.Draft202012Validator({"$ref": f"#/$defs/{KINDS[manifest['kind']]}", "$defs": whole["$defs"]}).validate(manifest)


def manifests() -> Iterator[tuple[Path, dict[str, Any]]]:
    for folder in FOLDERS:
        for path in sorted(folder.glob("*.yaml")):
            if path.name != "kustomization.yaml":
                yield from ((path, document) for document in yaml.safe_load_all(path.read_text()))


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    """Manifests by name."""
    return {document["metadata"]["name"]: document for _, document in manifests() if document["kind"] == kind}


def pod(deployment: Mapping[str, Any]) -> dict[str, Any]:
    return deployment["spec"]["template"]["spec"]


def container(deployment: Mapping[str, Any]) -> dict[str, Any]:
    (only,) = pod(deployment)["containers"]
    return only


def settings() -> dict[str, str]:
    return of_kind("ConfigMap")["nexus-settings"]["data"]


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    return yaml.safe_load((COMPOSE / name).read_text())


def nats_values() -> dict[str, Any]:
    """What the Helm chart is told about the servers' configuration."""
    return yaml.safe_load((KUBERNETES / "nats" / "values.yaml").read_text())["config"]


def environments() -> dict[str, dict[str, str]]:
    """Where variables are given → variable → value."""
    dockerfile = (OPS / "container" / "Dockerfile").read_text()
    given = {"ConfigMap": settings(), "Dockerfile": dict(re.findall(r"(?:^ENV|^   ) (\w+)=(\S+)", dockerfile, re.MULTILINE))}
    for name, service in compose()["services"].items():
        given[f"compose {name}"] = service.get("environment", {})
    for name, deployment in of_kind("Deployment").items():
        given[f"Deployment {name}"] = {each["name"]: each.get("value", "") for each in container(deployment).get("env", [])}
    return given
