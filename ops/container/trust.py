"""Whom servers of their own trust, and what workers show them: `python -m ops.container.trust AUTHORITY OUT [SERVER]`.

AUTHORITY keeps the operator's key, which is made there on the first call; no server and no worker needs to see it, only
`nexus tenant`. OUT gets trust.conf for a server's configuration file to include, trust.yaml with the same as values of the
official Helm chart, and for workers provider.creds and ca.pem, by which they check the server. SERVER (default: OUT) gets
server.pem and server.key: one certificate for all servers, by which they know each other too. NEXUS_TLS_NAMES has further
names by which tenants reach them. A certificate is good for 397 days, and made anew by a call in the last 30.
"""

import re
import shutil
import sys
from pathlib import Path

import yaml

from nexus_bus.bus.authority import PROVIDER_FILE, Authority
from nexus_bus.bus.tls import CA_FILE, Listening

RESOLVER = Path("/data/accounts")  # where the server keeps the tokens of tenants' accounts
SERVICE = ("nats", "nats.nexus", "nats.nexus.svc", "nats.nexus.svc.cluster.local")  # in compose, and in the namespace `nexus`
NAMES = (*SERVICE, *(f"nats-{node}.nats-headless" for node in range(5)))  # … where servers call each other like this
TOKEN = re.compile(r"^ +(A[A-Z2-7]{55}): (\S+)$", re.MULTILINE)


def helm_values(config: str) -> dict[str, object]:
    """The same in the shape of the chart, which has a resolver of its own.

    Raises:
        ValueError: the configuration does not say what the chart has to know.
    """
    found = {name: re.search(rf"^{name}: (\S+)$", config, re.MULTILINE) for name in ("operator", "system_account")}
    missing = [name for name, match in found.items() if match is None]
    tokens = dict(TOKEN.findall(config))
    if missing or len(tokens) < 2:
        raise ValueError(f"the server's configuration has another form: no {', '.join(missing) or 'accounts'} in it")
    return {"config": {"merge": {name: match[1] for name, match in found.items() if match} | {"resolver_preload": tokens}}}


def write(authority: Path, out: Path, server: Path) -> None:
    """All of it. Made anew it names the same keys, so that a server which has it already may go on."""
    config = Authority.at(authority).server_config(RESOLVER)
    cert, key = Listening(names=(*NAMES, *Listening.from_environment().names)).files(authority)
    for directory in (out, server):
        directory.mkdir(parents=True, exist_ok=True)
    (out / "trust.conf").write_text(config)
    (out / "trust.yaml").write_text(yaml.safe_dump(helm_values(config), width=10_000, sort_keys=False))
    for name in (PROVIDER_FILE, CA_FILE):
        shutil.copy(authority / name, out / name)
    for path in (cert, key):
        shutil.copy(path, server / path.name)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: python -m ops.container.trust AUTHORITY OUT [SERVER]")
    write(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[-1]))
