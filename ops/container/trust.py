"""Whom servers of their own trust, and what workers show them: `python -m ops.container.trust AUTHORITY OUT`.

AUTHORITY keeps the operator's key, which is made there on the first call; no server and no worker needs to see it, only
`nexus tenant`. OUT gets trust.conf for a server's configuration file to include, trust.yaml with the same as values of the
official Helm chart, and provider.creds for workers.
"""

import re
import shutil
import sys
from pathlib import Path

import yaml

from nexus_bus.bus.authority import PROVIDER_FILE, Authority

RESOLVER = Path("/data/accounts")  # where the server keeps the tokens of tenants' accounts
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


def write(authority: Path, out: Path) -> None:
    """All three files. Made anew they name the same keys, so that a server which has them already may go on."""
    config = Authority.at(authority).server_config(RESOLVER)
    out.mkdir(parents=True, exist_ok=True)
    (out / "trust.conf").write_text(config)
    (out / "trust.yaml").write_text(yaml.safe_dump(helm_values(config), width=10_000, sort_keys=False))
    shutil.copy(authority / PROVIDER_FILE, out / PROVIDER_FILE)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m ops.container.trust AUTHORITY OUT")
    write(Path(sys.argv[1]), Path(sys.argv[2]))
