"""`nexus tenant`, `whoami` and `server config`, on a real server with a gateway."""

import asyncio
import io
import json
import re
import stat
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nexus_bus import registry
from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.bus.authority import Authority
from nexus_bus.bus.server import find_binary
from nexus_bus.cli import main
from nexus_bus.cli.tenants import LIMITS
from nexus_bus.errors import Denied
from nexus_bus.plan import compile_plan
from schemas.job import JobSpec
from schemas.plan import JobState
from schemas.tenant import ServiceTerms, TenantLimits
from tests.unit.mastering import keep

Run = Callable[..., Awaitable[tuple[int, str, str]]]
ROOT = Path(__file__).resolve().parents[3]


class Terminal(io.StringIO):
    """What a person types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def nexus(
    server: EmbeddedServer,
    bus: Bus,
    gateway: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """`await nexus("tenant", "list")`: exit code, what was printed, what was said about errors."""
    monkeypatch.setenv("NEXUS_URL", server.url)
    monkeypatch.setenv("NEXUS_CREDS", str(server.creds))
    monkeypatch.delenv("NEXUS_TENANT", raising=False)
    monkeypatch.setattr("nexus_bus.logs.start", lambda *_: None)  # logging is the process's, and other tests are in it
    monkeypatch.chdir(tmp_path)

    async def run(*words: object) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, [str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


async def enters(server: EmbeddedServer, creds: str | Path) -> bool:
    try:
        bus = await Bus.connect(server.url, creds=creds)
    except Denied:
        return False
    await bus.close()
    return True


def files(directory: Path, pattern: str = "*") -> list[Path]:
    return sorted(directory.glob(pattern))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_credentials_go_into_a_file_that_only_its_owner_reads(nexus: Run, server: EmbeddedServer, tmp_path: Path) -> None:
    code, said, _ = await nexus(
        "tenant", "add", "acme", "--weight", 2, "--device-s", "3600", "--label", "laptop", "--expires", "90d"
    )
    assert (code, said) == (0, "acme may begin; credentials in acme.creds: they are shown once, hand them over safely\n")
    path = tmp_path / "acme.creds"
    assert mode(path) == 0o600
    assert await enters(server, path)
    assert files(tmp_path, ".*") == []
    found = json.loads((await nexus("tenant", "show", "acme", "--json"))[1])
    assert (found["tenant"]["limits"]["weight"], found["tenant"]["limits"]["device_s"], found["jobs"]) == (2, 3600, [])
    (key,) = found["tenant"]["keys"]
    assert (key["label"], key["expires"] - key["issued"]) == ("laptop", 90 * 86400)
    assert not re.search(r"SU[A-Z2-7]{56}", json.dumps(found)), "the secret half is not kept"


async def test_a_file_that_is_there_is_replaced_only_by_force(nexus: Run, server: EmbeddedServer, tmp_path: Path) -> None:
    path = tmp_path / "keys" / "some.creds"
    code, _, said = await nexus("tenant", "add", "acme", "--out", path)
    assert (code, said) == (2, f"nexus: out: {path}: No such file or directory; choose another file\n")
    path.parent.mkdir()
    path.write_text("precious")
    path.chmod(0o644)
    code, _, said = await nexus("tenant", "add", "acme", "--out", path)
    assert (code, said) == (2, f"nexus: out: {path} is there already; choose another file, or replace it with --force\n")
    assert path.read_text() == "precious"
    assert json.loads((await nexus("tenant", "list", "--json"))[1]) == [], "nothing was made whose credentials are lost"
    assert (await nexus("tenant", "add", "acme", "--out", path, "--force"))[0] == 0
    assert mode(path) == 0o600
    assert await enters(server, path)
    code, _, said = await nexus("tenant", "add", "acme", "--out", path, "--force")
    assert code == 2
    assert "'acme' exists since" in said
    assert await enters(server, path), "what failed replaces nothing"
    assert files(path.parent) == [path]
    assert (await nexus("tenant", "rotate", "acme", "--out", path.parent))[0] == 2


async def test_a_dash_prints_them(nexus: Run, server: EmbeddedServer, tmp_path: Path) -> None:
    code, said, _ = await nexus("tenant", "add", "acme", "--out", "-")
    assert code == 0
    (tmp_path / "kept.creds").write_text(said)
    assert await enters(server, tmp_path / "kept.creds")
    found = json.loads((await nexus("tenant", "rotate", "acme", "--keep", "--out", "-", "--json"))[1])
    (tmp_path / "other.creds").write_text(found["creds"])
    assert await enters(server, tmp_path / "other.creds")
    assert len(found["tenant"]["keys"]) == 2
    assert not (tmp_path / "-").exists()
    assert json.loads((await nexus("tenant", "rotate", "acme", "--json"))[1])["file"] == "acme.creds"
    assert not await enters(server, tmp_path / "kept.creds")


async def test_tenants_are_listed_and_shown(nexus: Run, server: EmbeddedServer, bus: Bus) -> None:
    assert (await nexus("tenant", "list"))[:2] == (0, "no tenants yet; `nexus tenant add NAME` adds one\n")
    for name in ("globex", "acme"):
        await nexus("tenant", "add", name, "--label", "[b]old[/b]")
    await nexus("tenant", "suspend", "globex", "--reason", "[red]unpaid")
    touch, data = {"id": "tabletop", "task": "touch"}, {"expert": {"episodes": 5}}
    spec = msgspec.convert({"kind": "sft", "name": "pick", "environment": touch, "data": data}, JobSpec)
    state = JobState(plan=compile_plan(spec, "acme"), phase="data", submission="s", submitted="now")
    await bus.kv("registry").create("job.acme.pick", state)
    lines = [line.split() for line in (await nexus("tenant", "list"))[1].splitlines()]
    assert [(line[0], line[1], line[2], line[3]) for line in lines[1:]] == [
        ("acme", "active", "1", "1"),
        ("globex", "suspended", "1", "1"),
    ]
    assert lines[2][5] == "[red]unpaid"
    shown = (await nexus("tenant", "show", "acme"))[1]
    assert "acme is active; added 20" in shown
    assert "jobs that have not ended: pick\n" in shown
    assert "keys: 1, revoked: 0\n" in shown
    assert "[b]old[/b]" in shown
    assert re.search(r"^connections +32 ", shown, re.MULTILINE)
    assert re.search(r"^jobs +as the service ", shown, re.MULTILINE)
    assert re.search(r"^money .* \[prices\]", shown, re.MULTILINE)
    assert "globex is suspended: [red]unpaid;" in (await nexus("tenant", "show", "globex"))[1]


async def test_a_limit_that_is_not_set_shows_what_holds_and_that_nothing_does(nexus: Run, bus: Bus) -> None:
    await nexus("tenant", "add", "acme", "--out", "-")
    await bus.kv("registry").put(registry.SERVICE, ServiceTerms(jobs=64, queued=2000, currency="EUR"))
    for words in (("tenant", "show", "acme"), ("whoami", "--tenant", "acme")):
        shown = (await nexus(*words))[1]
        for line in (
            r"jobs +64 \(the service's\) ",
            r"queued +2,000 \(the service's\) ",
            r"device_s +no limit ",
            r"slots +no limit ",
        ):
            assert re.search(f"^{line}", shown, re.MULTILINE), (line, shown)
    said = (await nexus("tenant", "limit", "acme", "jobs=none", "device_s=none"))[1]
    assert said == "acme: jobs 64 (the service's), device_s no limit\n"


async def test_a_limit_of_money_without_prices_is_said_to_count_for_nothing(
    nexus: Run, bus: Bus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NEXUS_CONFIG", raising=False)
    warning = (await nexus("tenant", "add", "acme", "--money", 5, "--out", "-"))[2]
    assert "money: counts for nothing without [prices]; the settings here have none, and no master" in warning
    (tmp_path / "nexus.toml").write_text('[prices]\ncurrency = "EUR"\n')
    monkeypatch.setenv("NEXUS_CONFIG", str(tmp_path / "nexus.toml"))
    assert (await nexus("tenant", "limit", "acme", "money=6"))[2] == ""
    await bus.kv("registry").put(registry.SERVICE, ServiceTerms(jobs=64, queued=2000))
    void = "ounts for nothing: the service has no [prices]"
    assert void in (await nexus("tenant", "limit", "acme", "money=7"))[2], "what the master has counts"
    assert void in (await nexus("tenant", "show", "acme"))[1]
    assert void in (await nexus("whoami", "--tenant", "acme"))[1]
    assert (await nexus("tenant", "limit", "acme", "jobs=7"))[2] == ""
    assert (await nexus("tenant", "limit", "acme", "money=none"))[2] == ""
    assert void not in (await nexus("tenant", "show", "acme"))[1]
    await bus.kv("registry").put(registry.SERVICE, ServiceTerms(jobs=64, queued=2000, currency="EUR"))
    assert (await nexus("tenant", "limit", "acme", "money=8"))[2] == ""
    assert void not in (await nexus("whoami", "--tenant", "acme"))[1]


async def test_a_key_that_has_expired_is_not_counted_among_the_good(nexus: Run, eventually: Any) -> None:
    await nexus("tenant", "add", "acme", "--expires", "1s", "--out", "-")

    async def expired() -> bool:
        return re.search(r"^acme +active +1 +0 \(1 expired\) ", (await nexus("tenant", "list"))[1], re.MULTILINE) is not None

    await eventually(expired)
    assert "keys: 0 (1 expired), revoked: 0\n" in (await nexus("tenant", "show", "acme"))[1]
    await nexus("tenant", "rotate", "acme", "--keep", "--out", "-")
    assert "keys: 1 (1 expired), revoked: 0\n" in (await nexus("tenant", "show", "acme"))[1]


async def test_versions_of_a_removed_tenant_are_said_to_be_gone_with_it(nexus: Run, bus: Bus) -> None:
    await nexus("tenant", "add", "acme", "--out", "-")
    await keep(bus)
    gone = "acme was removed, and the weights of all its versions with it\n"
    assert gone not in (await nexus("policies", "--tenant", "acme"))[1]
    assert (await nexus("tenant", "remove", "acme", "--yes"))[0] == 0
    shown = (await nexus("policies", "--tenant", "acme"))[1]
    assert "kept@0" in shown
    assert shown.endswith(gone)


def test_every_limit_has_a_flag() -> None:
    assert list(LIMITS) == [field.name for field in msgspec.structs.fields(TenantLimits)]


async def test_limits_are_set_by_name_or_by_flag(nexus: Run) -> None:
    await nexus("tenant", "add", "acme", "--jobs", 4)
    assert (await nexus("tenant", "limit", "acme", "weight=2.5", "jobs=none", "--stored-bytes", "1000"))[:2] == (
        0,
        "acme: weight 2.5, jobs as the service, stored_bytes 1,000\n",
    )
    found = json.loads((await nexus("tenant", "limit", "acme", "slots=2", "--json"))[1])
    limits = found["limits"]
    assert (limits["weight"], limits["jobs"], limits["stored_bytes"], limits["slots"]) == (2.5, None, 1000, 2)
    for words, said in [
        (("jobs=0",), "limit: jobs = '0': expected int >= 1"),
        (("weight=nan",), "limit: weight = 'nan': expected float >= 0.001"),
        (("--money", "inf"), "limit: money = 'inf': expected float <= 1000000000000000.0"),
        (("stored_bytes=9223372036854775808",), "limit: stored_bytes = '9223372036854775808': expected int <= "),
        (("jbos=1",), "did you mean 'jobs'?"),
        (("jobs",), "'jobs' is not of the form KEY=VALUE"),
        ((), "give what to change"),
    ]:
        code, _, complaint = await nexus("tenant", "limit", "acme", *words)
        assert code == 2
        assert said in complaint
    assert json.loads((await nexus("tenant", "show", "acme", "--json"))[1])["tenant"] == found
    code, _, complaint = await nexus("tenant", "add", "globex", "--jobs", "-1")
    assert code == 2
    assert "limit: jobs = '-1'" in complaint


async def test_keys_are_revoked_and_tenants_come_and_go(nexus: Run, server: EmbeddedServer, tmp_path: Path) -> None:
    await nexus("tenant", "add", "acme", "--label", "laptop")
    await nexus("tenant", "rotate", "acme", "--keep", "--label", "cluster", "--out", "cluster.creds")
    assert (await nexus("tenant", "revoke", "acme", "laptop"))[:2] == (0, "acme has 1 key\n")
    assert not await enters(server, tmp_path / "acme.creds")
    code, _, said = await nexus("tenant", "revoke", "acme", "laptop")
    assert code == 2
    assert "`nexus tenant show acme` lists its keys" in said
    assert (await nexus("tenant", "suspend", "acme", "--reason", "unpaid"))[:2] == (0, "acme is suspended\n")
    assert not await enters(server, tmp_path / "cluster.creds")
    assert (await nexus("tenant", "activate", "acme"))[:2] == (0, "acme is active\n")
    assert await enters(server, tmp_path / "cluster.creds")
    await nexus("tenant", "suspend", "acme")
    assert json.loads((await nexus("tenant", "resume", "acme", "--json"))[1])["phase"] == "active"
    assert (await nexus("tenant", "remove", "acme"))[:2] == (0, "acme is removed\n")
    assert not await enters(server, tmp_path / "cluster.creds")
    for words in (("remove", "acme"), ("rotate", "acme", "--force"), ("limit", "acme", "jobs=1"), ("show", "nobody")):
        code, said, complaint = await nexus("tenant", *words)
        assert (code, said) == (2, "")
        assert re.match(r"nexus: tenant: ('acme' was removed on|no 'nobody'; `nexus tenant list`)", complaint)


async def test_at_a_terminal_a_removal_is_asked_about(nexus: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    await nexus("tenant", "add", "acme")
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    code, _, said = await nexus("tenant", "remove", "acme")
    assert code == 130
    assert "Delete all weights of acme" in said
    assert json.loads((await nexus("tenant", "show", "acme", "--json"))[1])["tenant"]["phase"] == "active"
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert (await nexus("tenant", "remove", "acme"))[0] == 0
    await nexus("tenant", "add", "globex")
    monkeypatch.setattr("sys.stdin", Terminal(""))
    assert (await nexus("tenant", "remove", "globex", "--yes"))[0] == 0


@pytest.mark.parametrize("name", ["a.b", "*", "a b", "a" * 300, "акме", "", "public", "../a"], ids=ascii)
async def test_what_is_no_name_is_one_sentence_and_no_file(nexus: Run, tmp_path: Path, name: str) -> None:
    before = files(tmp_path, "**/*.creds")
    for words in (("add", name), ("show", name), ("rotate", name), ("remove", name)):
        code, said, complaint = await nexus("tenant", *words)
        assert (code, said, complaint.count("\n")) == (2, "", 1)
        assert complaint.startswith("nexus: tenant: ")
    assert files(tmp_path, "**/*.creds") == before


@pytest.mark.parametrize("time", ["90", "0d", "-1d", "1y", "d", "nan", "1e9d", "999999999w", "٣d", ""])
async def test_what_is_no_time_is_refused(nexus: Run, time: str) -> None:
    code, _, complaint = await nexus("tenant", "add", "acme", "--expires", time)
    assert code == 2
    assert "give a time like 90d" in complaint
    assert json.loads((await nexus("tenant", "list", "--json"))[1]) == []


async def test_only_the_operator_adds_tenants(nexus: Run, server: EmbeddedServer, tmp_path: Path) -> None:
    code, _, complaint = await nexus("tenant", "list", "--authority", tmp_path / "nowhere")
    assert code == 2
    assert "no operator's key (operator.nk)" in complaint
    assert "NEXUS_AUTHORITY" in complaint
    Authority.at(tmp_path / "foreign")
    code, _, complaint = await nexus("tenant", "add", "acme", "--authority", tmp_path / "foreign")
    assert code == 2
    assert "of another server" in complaint
    assert not (tmp_path / "acme.creds").exists()


async def test_a_tenant_sees_its_limits_and_what_is_taken(nexus: Run, server: EmbeddedServer, tmp_path: Path) -> None:
    await nexus("tenant", "add", "acme", "--jobs", 4, "--expires", "90d")
    code, said, _ = await nexus("whoami", "--creds", tmp_path / "acme.creds")
    assert code == 0
    assert said.startswith(f"you are acme, active, at {server.url}\n")
    assert re.search(r"^credentials .*acme\.creds, key U[A-Z2-7]{55}, good until 20", said, re.MULTILINE)
    assert re.search(r"^jobs +4 +0 ", said, re.MULTILINE)
    account = json.loads((await nexus("whoami", "--creds", tmp_path / "acme.creds", "--json"))[1])
    assert (account["tenant"], account["limits"]["jobs"], account["used"]["jobs"]) == ("acme", 4, 0)
    said = (await nexus("whoami", "--creds", server.creds, "--tenant", "acme"))[1]
    assert said.startswith("you are the provider; this is acme, active")
    (tmp_path / "half.creds").write_text((tmp_path / "acme.creds").read_text()[:700])
    code, said, complaint = await nexus("whoami", "--creds", tmp_path / "half.creds")
    assert (code, said) == (2, "")
    assert str(tmp_path / "half.creds") in complaint
    code, _, complaint = await nexus("whoami", "--creds", tmp_path / "acme.creds", "--tenant", "globex")
    assert code == 2
    assert "speak for 'acme', not for 'globex'" in complaint


def test_what_a_server_is_told_is_no_secret_and_a_server_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "authority"
    for name in ("server.conf", "trust.conf"):
        (tmp_path / name).write_text((ROOT / "ops" / "nats" / "server.conf").read_text())
    arguments = ["server", "config", "--authority", str(where), "--accounts", str(tmp_path / "accounts")]
    assert main([*arguments, "--out", str(tmp_path / "trust.conf")]) == 0
    assert f"made a new operator's key in {where}" in capsys.readouterr().err
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert said.err == ""
    text = (tmp_path / "trust.conf").read_text()
    for one in (text, said.out):
        assert not re.search(r"\bS[OAU][A-Z2-7]{40,}", one), "a secret"
        assert (where / "operator.nk").read_text().strip() not in one
        assert str(tmp_path / "accounts") in one
        assert [line for line in one.splitlines() if line.startswith("#") and "nexus tenant add" in line]
    checked = subprocess.run(
        [find_binary(), "-t", "-c", str(tmp_path / "server.conf")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert main([*arguments[:-1], 'a"b']) == 2
    assert main([*arguments, "--out", str(tmp_path / "no" / "where")]) == 1
