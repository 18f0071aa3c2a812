"""What runs the service elsewhere agrees with the published schemas, with the settings and with the metrics.

Nothing here is applied: there is no cluster and no container engine in a test. The schemas under tests/data/schemas say where
they come from. What a kubelet would run in a container, the probes, is run here.
"""

import os
import re
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from nexus_bus import config, host, pricing, worker
from nexus_bus.bus.authority import PROVIDER_FILE
from nexus_bus.bus.server import MAX_PAYLOAD
from nexus_bus.bus.tls import CA_FILE
from nexus_bus.metrics import METRICS
from tests.unit.ops.manifests import (
    COMPOSE,
    FOLDERS,
    OPS,
    ROOT,
    WORKERS,
    compose,
    container,
    environments,
    manifests,
    nats_values,
    of_kind,
    pod,
    schema,
    settings,
    validate,
)

# Schemas


@pytest.mark.parametrize(
    "manifest", [document for _, document in manifests()], ids=lambda d: f"{d['kind']}-{d['metadata']['name']}"
)
def test_every_manifest_is_what_the_published_schema_says(manifest: dict[str, Any]) -> None:
    validate(manifest)


@pytest.mark.parametrize("name", ["compose.yaml", "gpu.yaml"])
def test_the_compose_files_are_what_the_compose_specification_says(name: str) -> None:
    jsonschema.Draft7Validator(schema("compose-spec.json")).validate(compose(name))


def test_a_misspelt_field_is_refused() -> None:
    deployment = of_kind("Deployment")["rollout"]
    validate(deployment)
    container(deployment)["readynessProbe"] = {}
    with pytest.raises(jsonschema.ValidationError, match="readynessProbe"):
        validate(deployment)
    scaled = of_kind("ScaledObject")["rollout"]
    scaled["spec"]["maxReplicas"] = 3
    with pytest.raises(jsonschema.ValidationError, match="maxReplicas"):
        validate(scaled)
    file = compose()
    file["services"]["nats"]["volume"] = []
    with pytest.raises(jsonschema.ValidationError, match="volume"):
        jsonschema.Draft7Validator(schema("compose-spec.json")).validate(file)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_kustomize_takes_every_file_of_its_folder(folder: Path) -> None:
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    files = sorted(path.name for path in folder.glob("*.yaml") if path.name != "kustomization.yaml")
    assert sorted(name for name in listed if name.endswith(".yaml")) == files
    assert all((folder / name).exists() for name in listed)


# Roles


def test_every_role_runs_and_nothing_else() -> None:
    assert set(of_kind("Deployment")) == {*WORKERS, "metrics"}
    assert set(compose()["services"]) == {*WORKERS, "metrics", "nats", "authority", "operator"}
    assert set(compose("gpu.yaml")["services"]) <= set(compose()["services"])


@pytest.mark.parametrize("role", WORKERS)
def test_a_worker_runs_as_its_role_under_the_name_of_its_pod(role: str) -> None:
    assert container(of_kind("Deployment")[role])["args"] == ["worker", role, "--name", "$(POD_NAME)"]
    assert compose()["services"][role]["command"] == [role]


def test_workers_differ_only_where_they_must() -> None:
    """Each manifest is whole, so that it can be read alone; what all share is the same in each."""
    shared: dict[str, dict[str, Any]] = {}
    for role in WORKERS:
        spec = pod(of_kind("Deployment")[role])
        one = {k: v for k, v in container(of_kind("Deployment")[role]).items() if k not in ("name", "args", "resources")}
        one["volumeMounts"] = [mount for mount in one["volumeMounts"] if mount["name"] != "datasets"]
        volumes = [volume for volume in spec["volumes"] if volume["name"] != "datasets"]
        shared[role] = spec | {"containers": [one], "volumes": volumes, "topologySpreadConstraints": None}
    assert [role for role in WORKERS if shared[role] != shared["rollout"]] == []


def test_numbers_that_would_count_twice_are_told_by_one_alone() -> None:
    for name in ("metrics", "health"):
        assert of_kind("Deployment")[name]["spec"]["replicas"] == 1
        assert of_kind("Deployment")[name]["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("name", [*WORKERS, "metrics"])
def test_labels_select_the_pods_they_stand_on(name: str) -> None:
    deployment = of_kind("Deployment")[name]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["metadata"]["labels"] == labels
    assert labels["app.kubernetes.io/component"] == name
    for constraint in pod(deployment).get("topologySpreadConstraints", []):
        assert constraint["labelSelector"]["matchLabels"] == labels
    if budget := of_kind("PodDisruptionBudget").get(name):
        assert budget["spec"]["selector"]["matchLabels"] == labels


@pytest.mark.parametrize("role", WORKERS)
def test_a_worker_is_given_more_time_to_drain_than_it_takes(role: str) -> None:
    assert pod(of_kind("Deployment")[role])["terminationGracePeriodSeconds"] >= worker.GRACE_S + 10
    assert float(compose()["services"][role]["stop_grace_period"].removesuffix("s")) >= worker.GRACE_S + 10


@pytest.mark.parametrize("role", ["inference", "trainer"])
def test_models_get_a_gpu(role: str) -> None:
    assert container(of_kind("Deployment")[role])["resources"]["limits"]["nvidia.com/gpu"] == "1"
    (device,) = compose("gpu.yaml")["services"][role]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


# Settings


def test_every_variable_named_is_a_setting() -> None:
    fields = {role: {field.name for field in msgspec.structs.fields(kind)} for role, kind in config.ROLES.items()}
    known = {config.HOME, config.FILE, config.AUTHORITY, config.CA, "NEXUS_TLS_NAMES"} | {
        f"NEXUS_{name.upper()}" for names in fields.values() for name in names
    }
    known |= {f"NEXUS_{role.upper()}_{name.upper()}" for role, names in fields.items() for name in names}
    given = {(where, name) for where, each in environments().items() for name in each if name.startswith("NEXUS_")}
    assert {(where, name) for where, name in given if name not in known} == set()
    assert len(given) > 10  # and they were found


@pytest.mark.parametrize("role", config.ROLES)
@pytest.mark.parametrize("where", ["ConfigMap", "compose rollout"])
def test_a_role_takes_the_settings(role: str, where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("NEXUS_")]:
        monkeypatch.delenv(name)
    for name, value in environments()[where].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(config.FILE, str(settings_files(tmp_path)[where]))
    loaded = config.load(role).value
    assert loaded.url == "tls://nats:4222"
    assert loaded.alive_file
    assert loaded.replicas == (3 if where == "ConfigMap" else 1)


@pytest.mark.parametrize("name", [*WORKERS, "metrics"])
def test_credentials_lie_where_the_settings_say_and_are_in_no_manifest(name: str) -> None:
    deployment = of_kind("Deployment")[name]
    (mount,) = [mount for mount in container(deployment)["volumeMounts"] if mount["name"] == "creds"]
    assert f"{mount['mountPath']}/{PROVIDER_FILE}" == settings()["NEXUS_CREDS"]
    assert f"{mount['mountPath']}/{CA_FILE}" == settings()["NEXUS_CA"]
    assert mount["readOnly"]
    assert of_kind("Secret") == {}
    volumes = {volume["name"]: volume for volume in pod(deployment)["volumes"]}
    assert volumes["creds"]["secret"]["secretName"] == "nexus-creds"
    assert {mount["name"] for mount in container(deployment)["volumeMounts"]} == set(volumes)


def settings_files(directory: Path) -> dict[str, Path]:
    """The settings file that a role is given, in both."""
    (directory / "nexus.toml").write_text(of_kind("ConfigMap")["nexus-config"]["data"]["nexus.toml"])
    return {"ConfigMap": directory / "nexus.toml", "compose rollout": COMPOSE / "nexus.toml"}


def test_everybody_knows_prices_so_that_budgets_of_money_count(tmp_path: Path) -> None:
    loaded = [pricing.load(path) for path in settings_files(tmp_path).values()]
    assert loaded[0] is not None
    assert loaded[0] == loaded[1]
    assert min(loaded[0].device_s, loaded[0].session_s, loaded[0].stored_gb_day) > 0
    for name in [*WORKERS, "metrics"]:
        deployment = of_kind("Deployment")[name]
        (mount,) = [mount for mount in container(deployment)["volumeMounts"] if mount["name"] == "config"]
        (volume,) = [volume for volume in pod(deployment)["volumes"] if volume["name"] == "config"]
        assert f"{mount['mountPath']}/nexus.toml" == settings()["NEXUS_CONFIG"]
        assert volume["configMap"]["name"] == "nexus-config"
    for name in [*WORKERS, "metrics", "operator"]:
        service = compose()["services"][name]
        assert f"./nexus.toml:{service['environment']['NEXUS_CONFIG']}:ro" in service["volumes"]


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_a_probe_says_what_the_alive_file_says(probe: str, tmp_path: Path) -> None:
    file = tmp_path / "alive"

    def passes() -> bool:
        command = container(of_kind("Deployment")["rollout"])[probe]["exec"]["command"]
        return subprocess.run(command, env=os.environ | {"NEXUS_ALIVE_FILE": str(file)}, check=False).returncode == 0

    assert not passes()
    file.write_text("starting")
    assert passes() == (probe != "readinessProbe")
    file.write_text("running")
    assert passes()
    long_ago = time.time() - 600
    os.utime(file, (long_ago, long_ago))
    assert passes() == (probe != "livenessProbe")


# Scaling


@pytest.mark.parametrize("name", of_kind("ScaledObject"))
def test_an_autoscaler_reads_metrics_that_exist_and_sets_a_number_that_nobody_else_sets(name: str) -> None:
    spec = of_kind("ScaledObject")[name]["spec"]
    target = of_kind("Deployment")[spec["scaleTargetRef"]["name"]]
    assert "replicas" not in target["spec"]
    for trigger in spec["triggers"]:
        query = trigger["metadata"]["query"]
        used = re.findall(r"nexus_\w+", query)
        assert used
        assert set(used) <= METRICS.keys()
        for metric, selector in re.findall(r"(nexus_\w+)\{([^}]*)\}", query):
            label, value = re.fullmatch(r'(\w+)="(\w+)"', selector).groups()  # type: ignore[union-attr]
            assert label in METRICS[metric][1]
            assert value == name


# NATS, containers


def test_nats_has_as_many_servers_as_streams_have_copies() -> None:
    values = nats_values()
    assert values["cluster"]["enabled"]
    assert values["cluster"]["replicas"] == int(settings()["NEXUS_REPLICAS"])
    assert values["jetstream"]["fileStore"]["pvc"]["enabled"]
    assert values["merge"]["max_payload"] == f"<< {MAX_PAYLOAD >> 20}MB >>"


def test_what_compose_mounts_and_waits_for_exists() -> None:
    file = compose()
    for service in file["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in file["volumes"] if not source.startswith(".") else (COMPOSE / source).is_file()
        assert set(service.get("depends_on", {})) <= set(file["services"])
    build = file["services"]["authority"]["build"]
    assert (COMPOSE / build["context"] / build["dockerfile"]).resolve() == OPS / "container" / "Dockerfile"


def test_the_image_has_what_it_copies_installs_and_promises() -> None:
    text = (OPS / "container" / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = [name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for name in line.split()]
    assert {name for name in copied if not (ROOT / name).exists()} == set()
    assert {"schemas", "nexus_bus", "workers", "ops"} <= set(copied)
    kept = {line[1:] for line in (OPS / "container" / "Dockerfile.dockerignore").read_text().split() if line.startswith("!")}
    assert kept == set(copied)
    extras = re.search(r'"\.\[([\w,]+)\]"', text)
    assert extras
    optional = project["optional-dependencies"]
    assert set(extras[1].split(",")) <= optional.keys()
    needs = " ".join(need for extra in extras[1].split(",") for need in optional[extra])
    assert {name for name in ("cryptography", "prometheus-client", "torch", "mujoco") if name not in needs} == set()
    assert environments()["Dockerfile"].items() >= host.ENVIRONMENT.items()
    users = {str(pod(deployment)["securityContext"]["runAsUser"]) for deployment in of_kind("Deployment").values()}
    assert re.findall(r"^USER (\d+):", text, re.MULTILINE) == [*users]
    tags = {image["newTag"] for image in yaml.safe_load((FOLDERS[0] / "kustomization.yaml").read_text())["images"]}
    assert tags == {project["version"]} == {compose()["services"]["rollout"]["image"].split(":")[1]}
