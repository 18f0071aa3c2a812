"""Who may speak to whom: the network policies, and TLS between servers and to clients, with real servers."""

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from nexus_bus.bus.authority import PROVIDER_FILE
from nexus_bus.bus.server import die_with_parent, find_binary
from nexus_bus.bus.tls import CA_FILE, context
from ops.container import trust
from tests.conftest import free_port
from tests.unit.ops.manifests import COMPOSE, WORKERS, compose, manifests, nats_values

Labels = Mapping[str, str]
NATS, METRICS = (
    {"app.kubernetes.io/name": "nats"},
    {"app.kubernetes.io/name": "nexus", "app.kubernetes.io/component": "metrics"},
)
WORKER = {"app.kubernetes.io/name": "nexus", "app.kubernetes.io/component": "rollout"}
STRANGER = {"app": "web"}
HERE, PROMETHEUS, ELSEWHERE = "nexus", "monitoring", "default"
SECRET = {"tls.crt": "server.pem", "tls.key": "server.key", "ca.crt": CA_FILE}  # as the README makes `nats-tls`
MOUNTED = "/etc/nats-certs/"  # where the chart mounts it: one folder for each port


# Network policies


def policies(*folders: str) -> list[dict[str, Any]]:
    return [manifest for path, manifest in manifests() if manifest["kind"] == "NetworkPolicy" and path.parent.name in folders]


def selects(selector: Mapping[str, Any], labels: Labels) -> bool:
    assert set(selector) <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def admits(policy: Mapping[str, Any], way: str, port: int, peer: Labels, namespace: str) -> bool:
    """Whether one policy lets a connection through: `way` is ingress or egress, the peer a pod in a namespace."""
    for rule in policy["spec"].get(way, []):
        if port not in {each["port"] for each in rule["ports"]}:
            continue
        for one in rule["from" if way == "ingress" else "to"]:
            if "ipBlock" in one and one["ipBlock"]["cidr"] == "0.0.0.0/0":
                return True
            if "namespaceSelector" in one:
                if one["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": namespace}:
                    return True
            elif "podSelector" in one and namespace == HERE and selects(one["podSelector"], peer):
                return True
    return False


def reaches(source: Labels, target: Labels, port: int, *, namespace: str = HERE, folders: tuple[str, ...] = ("base",)) -> bool:
    """As Kubernetes decides: whoever is selected for a direction needs a policy that admits it."""
    known = policies(*folders)
    entering = [p for p in known if "Ingress" in p["spec"]["policyTypes"] and selects(p["spec"]["podSelector"], target)]
    if entering and not any(admits(policy, "ingress", port, source, namespace) for policy in entering):
        return False
    leaving = [p for p in known if "Egress" in p["spec"]["policyTypes"] and selects(p["spec"]["podSelector"], source)]
    if namespace != HERE or not leaving:
        return True
    return any(admits(policy, "egress", port, target, HERE) for policy in leaving)


def test_workers_reach_clients_port_and_nothing_else() -> None:
    for role in [*WORKERS, "metrics"]:
        pod = WORKER | {"app.kubernetes.io/component": role}
        assert reaches(pod, NATS, 4222)
        assert [port for port in (6222, 7777, 8222) if reaches(pod, NATS, port)] == []
        assert not reaches(pod, METRICS, 9464)
        assert not reaches(pod, WORKER, 80)


def test_servers_alone_reach_the_routes() -> None:
    assert reaches(NATS, NATS, 6222)
    assert not reaches(NATS, NATS, 4222)
    assert not reaches(NATS, WORKER, 80)
    for peer, namespace in ((STRANGER, HERE), (WORKER, HERE), (NATS, ELSEWHERE), (STRANGER, PROMETHEUS)):
        assert not reaches(peer, NATS, 6222, namespace=namespace)
        assert not reaches(peer, NATS, 6222, namespace=namespace, folders=("base", "door"))


def test_nobody_reaches_the_monitoring_port_and_prometheus_alone_the_numbers() -> None:
    assert reaches(STRANGER, METRICS, 9464, namespace=PROMETHEUS)
    assert reaches(STRANGER, NATS, 7777, namespace=PROMETHEUS)
    for peer, namespace in ((STRANGER, HERE), (STRANGER, ELSEWHERE)):
        assert not reaches(peer, METRICS, 9464, namespace=namespace)
        assert not reaches(peer, NATS, 7777, namespace=namespace)
    assert not reaches(STRANGER, NATS, 8222, namespace=PROMETHEUS)


def test_strangers_come_in_by_the_door_alone() -> None:
    assert not reaches(STRANGER, NATS, 4222, namespace=ELSEWHERE)
    assert reaches(STRANGER, NATS, 4222, namespace=ELSEWHERE, folders=("base", "door"))
    assert not reaches(STRANGER, METRICS, 9464, namespace=ELSEWHERE, folders=("base", "door"))


def test_everybody_may_resolve_names() -> None:
    (dns,) = [policy for policy in policies("base") if policy["metadata"]["name"] == "dns"]
    assert dns["spec"]["podSelector"] == {}
    assert {(port["protocol"], port["port"]) for port in dns["spec"]["egress"][0]["ports"]} == {("UDP", 53), ("TCP", 53)}


# TLS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `ops.container.trust` makes."""
    directory = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEXUS_TLS_NAMES", "bus.example.org")
        trust.write(directory / "authority", directory / "out", directory / "server")
    return directory


def mount(made: Path, directory: Path) -> Path:
    """The secret `nats-tls` as the chart mounts it."""
    for port in ("nats", "cluster"):
        (directory / port).mkdir(parents=True)
        for key, name in SECRET.items():
            shutil.copy(made / ("out" if name == CA_FILE else "server") / name, directory / port / key)
    return directory


def tls(part: Mapping[str, Any], port: str, mounted: Path) -> dict[str, Any]:
    """What the chart makes of `tls` in its values."""
    assert part["enabled"]
    assert part["secretName"] == "nats-tls"
    files = {"cert_file": f"{MOUNTED}{port}/tls.crt", "key_file": f"{MOUNTED}{port}/tls.key"} | part["merge"]
    return {key: value.replace(MOUNTED, f"{mounted}/") if isinstance(value, str) else value for key, value in files.items()}


def test_every_party_gets_what_it_needs_and_no_more(made: Path) -> None:
    assert {path.name for path in (made / "out").iterdir()} == {"trust.conf", "trust.yaml", PROVIDER_FILE, CA_FILE}
    assert {path.name for path in (made / "server").iterdir()} == {"server.pem", "server.key"}
    assert (made / "server" / "server.key").stat().st_mode & 0o77 == 0
    services = compose()["services"]
    holders = {name for name, one in services.items() if any(v.startswith("server:") for v in one.get("volumes", []))}
    assert holders == {"authority", "nats"}
    keepers = {name for name, one in services.items() if any(v.startswith("authority:") for v in one.get("volumes", []))}
    assert keepers == {"authority", "operator"}


def test_a_server_takes_the_trust_of_the_operator_in_both_forms(made: Path, tmp_path: Path) -> None:
    merged = yaml.safe_load((made / "out" / "trust.yaml").read_text())["config"]["merge"]
    assert "operator.nk" not in json.dumps(merged)
    resolver = nats_values()["resolver"]["merge"] | {"dir": str(tmp_path / "accounts")}
    (tmp_path / "helm.json").write_text(json.dumps(merged | {"resolver": resolver}))
    mounted = tmp_path / "trust"  # beside the configuration, as compose mounts it
    mounted.mkdir()
    (mounted / "trust.conf").write_text((made / "out" / "trust.conf").read_text().replace("/data/", f"{tmp_path}/data/"))
    text = (COMPOSE / "nats.conf").read_text().replace("/data/", f"{tmp_path}/data/")
    assert text.count("/etc/nats/server/") == 2
    (tmp_path / "compose.conf").write_text(text.replace("/etc/nats/server/", f"{made}/server/"))
    for name in ("helm.json", "compose.conf"):
        done = subprocess.run([find_binary(), "-t", "-c", str(tmp_path / name)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


class Node:
    """A nats-server with the clients' port, the routes and TLS of the chart's values; without JetStream."""

    def __init__(self, name: str, directory: Path, mounted: Path | None, known: "Node | None" = None) -> None:
        """Start it. One that knows another tries to join it; without `mounted` it has no certificate."""
        self.name, self.port, self.route, self.monitor = name, free_port(), free_port(), free_port()
        self.log = directory / f"{name}.log"
        values = nats_values()
        cluster: dict[str, Any] = {"name": "nats", "listen": f"127.0.0.1:{self.route}", "connect_retries": 100}
        config: dict[str, Any] = {"server_name": name, "listen": f"127.0.0.1:{self.port}", "cluster": cluster}
        config |= {"http": f"127.0.0.1:{self.monitor}", "log_file": str(self.log)}
        if known is not None:
            cluster["routes"] = [f"{'tls' if mounted else 'nats'}://localhost:{known.route}"]
        if mounted is not None:
            cluster["tls"] = tls(values["cluster"]["tls"], "cluster", mounted)
            config["tls"] = tls(values["nats"]["tls"], "nats", mounted)
        (directory / f"{name}.json").write_text(json.dumps(config))
        self.process = subprocess.Popen(
            [find_binary(), "-c", str(directory / f"{name}.json")],
            preexec_fn=die_with_parent(),  # noqa: PLW1509 - only a system call, made ready before the fork
        )

    def peers(self) -> set[str]:
        """Servers that it is joined with."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.monitor}/routez", timeout=10) as answer:
            return {route["remote_name"] for route in json.load(answer)["routes"]}

    def said(self, words: str) -> bool:
        """Whether its log has these words."""
        return self.log.exists() and words in self.log.read_text()


def until(condition: Callable[[], bool]) -> None:
    """Wait for it; servers take a moment."""
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.fixture
def start(made: Path, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Start a server in the cluster's way: `start(name, secret, known)`."""
    nodes: list[Node] = []

    def begin(name: str, mounted: Path | None, known: Node | None = None) -> Node:
        nodes.append(Node(name, tmp_path, mounted, known))
        until(lambda: nodes[-1].said("Server is ready"))
        return nodes[-1]

    yield begin
    for node in nodes:
        node.process.terminate()
        node.process.wait()


def test_who_has_no_certificate_of_ours_cannot_join_as_a_server(made: Path, tmp_path: Path, start: Callable[..., Node]) -> None:
    trust.write(tmp_path / "their-authority", tmp_path / "theirs" / "out", tmp_path / "theirs" / "server")
    first = start("first", mount(made, tmp_path / "ours"))
    naked = start("naked", None, first)
    forger = start("forger", mount(tmp_path / "theirs", tmp_path / "forged"), first)
    until(lambda: first.log.read_text().count("TLS route handshake error") >= 2 and forger.said("TLS route handshake error"))
    second = start("second", tmp_path / "ours", first)
    until(lambda: first.peers() == {"second"} and second.peers() == {"first"})
    assert naked.peers() == forger.peers() == set()


def test_a_client_finds_tls_and_a_certificate_for_every_name(made: Path, tmp_path: Path, start: Callable[..., Node]) -> None:
    node = start("alone", mount(made, tmp_path / "ours"))
    for name in ("nats", "nats.nexus.svc", "nats-2.nats-headless", "localhost", "bus.example.org"):
        with socket.create_connection(("127.0.0.1", node.port), timeout=10) as plain:
            greeting = json.loads(plain.recv(4096).split(b"\r\n")[0].removeprefix(b"INFO "))
            assert greeting["tls_required"]
            with context(made / "out" / CA_FILE).wrap_socket(plain, server_hostname=name) as secured:
                assert secured.version() in ("TLSv1.2", "TLSv1.3")
