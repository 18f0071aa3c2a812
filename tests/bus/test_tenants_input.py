"""What is wrong with credentials, names and limits is said by name and does nothing; nor does a clock that is wrong."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.errors import Error as NatsError
from tenancy import admitted, ask, raw, refused, written

from nexus_bus import tenants
from nexus_bus.bus import Bus, EmbeddedServer, authority, jwt
from nexus_bus.bus.authority import Authority
from nexus_bus.bus.jwt import Key
from nexus_bus.errors import BadJob, Denied, NexusError
from nexus_bus.tenants import Tenants, limits_of, tenants_of
from nexus_bus.worker import Context, Pulse
from schemas.tenant import TenantLimits
from tests.conftest import Eventually
from workers.gateway import Gateway

DAY_S, HOUR_S = 86400, 3600


@pytest.fixture
async def operator(server: EmbeddedServer, gateway: Gateway) -> AsyncIterator[Tenants]:
    """What an operator has in hand."""
    async with tenants_of(server.url, server.authority) as found:
        yield found


async def test_credentials_end_when_they_were_said_to(
    operator: Tenants, server: EmbeddedServer, eventually: Eventually
) -> None:
    for expires_s in (3, 6, 12, 24, 48):  # a busy machine may take longer than that to let somebody in
        creds = (await operator.add(f"acme-{expires_s}", expires_s=expires_s)).creds
        with suppress(NatsError):
            client = await raw(server, creds)
            break
    else:
        pytest.fail("nobody is let in")
    await eventually(lambda: client.is_closed, within=90)
    (key,) = (await operator.find(f"acme-{expires_s}")).keys
    # In the very second of their end the server still opens the door, and closes it again.
    await eventually(lambda: key.expires is not None and time.time() > key.expires + 1)
    assert "(they expire on 20" in await refused(server, written(server, creds))
    for never in (0, -1, 0.5, float("nan"), float("inf")):
        with pytest.raises(BadJob, match="expires: "):
            await operator.rotate(f"acme-{expires_s}", expires_s=never)


async def test_half_a_file_is_refused_by_its_name(operator: Tenants, server: EmbeddedServer) -> None:
    text = (await operator.add("acme")).creds
    seed_ends = text.index("\n------END USER NKEY SEED")
    for length in range(len(text)):
        path = written(server, text[:length])
        if length < seed_ends + len("\n------END USER NKEY SEED---"):
            with pytest.raises(Denied, match=f"{re.escape(str(path))}: .*`nexus tenant rotate`"):
                jwt.read_creds(path)
        else:  # nothing but dashes is missing
            assert jwt.read_creds(path).tenant == "acme"
    for length in (0, 1, 100, text.index(".") + 5, len(text) // 2, seed_ends):
        await refused(server, written(server, text[:length]))


async def test_damaged_files_are_refused_by_their_name(operator: Tenants, server: EmbeddedServer) -> None:
    text, other = (await operator.add("acme")).creds, (await operator.add("globex")).creds
    lines = text.splitlines()
    token = lines[1]
    assert "another token" in await refused(server, written(server, text.replace(lines[-2], other.splitlines()[-2])))
    for content in (
        b"",
        b"\0" * 5000,
        b"\xff\xfe" + text.encode("utf-16-le"),
        text * 100,
        text.replace(token, token[:-3] + ("AAA" if not token.endswith("AAA") else "BBB")),  # another signature
        text.replace(token, token.replace(".", "..")),
        text.replace(token, "e30.e30.e30"),
        text.replace(token, "AAAA." + "A" * 40 + ".A"),
        text.replace(lines[-2], lines[-2][:-1]),
        text.replace(lines[-2], lines[-2].lower()),
        text.replace(lines[-2], Key.new("account").seed),
    ):
        await refused(server, written(server, content))
    await refused(server, server.directory)
    assert "No such file" in await refused(server, server.directory / "nowhere.creds")


async def test_credentials_of_another_service_are_refused(operator: Tenants, server: EmbeddedServer, tmp_path: Path) -> None:
    foreign = Authority.at(tmp_path / "foreign")
    key = Key.new("user")
    record = msgspec.structs.replace((await operator.add("acme")).record, account=foreign.tenant("acme").public)
    creds = foreign.tenant_creds(record, key, issued=int(time.time()))
    # A tenant that signs another tenant's credentials with a key of its own
    forged = Authority(Key.new("operator")).tenant_creds((await operator.find("acme")), key, issued=int(time.time()))

    async def no_operator() -> None:
        with pytest.raises(Denied, match="of another server"):
            async with tenants_of(server.url, tmp_path / "foreign"):
                pass

    said = await asyncio.gather(  # side by side: a client takes seconds to give up
        refused(server, written(server, creds)),
        refused(server, tmp_path / "foreign" / "provider.creds"),
        refused(server, written(server, forged, "forged.creds")),
        no_operator(),
    )
    assert all("of another server" in why for why in said[:2])
    with pytest.raises(Denied, match=r"no operator's key \(operator\.nk\)"):
        async with tenants_of(server.url, tmp_path / "nowhere"):
            pass


@pytest.mark.parametrize("content", [b"", b"SO", b"\xff\xfe\x00", Key.new("user").seed.encode()])
def test_a_damaged_operator_key_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    Authority.at(tmp_path)
    (tmp_path / "operator.nk").write_bytes(content)
    with pytest.raises(Denied, match=r"operator\.nk: .*restore it from a backup"):
        Authority.kept(tmp_path)


# What an operator may type

OTHER_SCRIPTS = ["акме", "\uff41cme", "茶", "\u202eacme", "a\u0301cme"]
NAMES = [
    "", ".", "a.b", "*", ">", "acme.*", "a b", " acme", "acme\n", "a\0b", "a" * 300, "a" * 64, "Acme", "-a", "a/b", "../a",
    "public", "provider", "system", *OTHER_SCRIPTS,
]  # fmt: skip


async def test_what_is_no_name_is_refused_and_nothing_is_kept_of_it(operator: Tenants) -> None:
    calls: list[Callable[[str], Awaitable[Any]]] = [
        operator.add, operator.find, operator.rotate, operator.suspend, operator.activate, operator.remove,
        lambda one: operator.revoke(one, "key"), lambda one: operator.limit(one, {"jobs": 1}),
    ]  # fmt: skip
    for name in NAMES:
        for call in calls:
            with pytest.raises(BadJob, match=r"^tenant: .* is (not a name|reserved)") as caught:
                await call(name)
            assert len(str(caught.value)) < 300
    assert await operator.all() == []


@pytest.mark.parametrize("name", ["a", "0", "a-b_c", "a" * 63])
async def test_names_at_the_edge_are_names(operator: Tenants, server: EmbeddedServer, name: str) -> None:
    client = await raw(server, (await operator.add(name)).creds)
    assert (await ask(client))["tenant"] == name
    await client.close()


WRONG = [
    ("jobs", 0), ("jobs", -1), ("jobs", 2**63), ("jobs", 2**31), ("jobs", 1.5), ("jobs", True), ("jobs", "many"), ("jobs", ""),
    ("jobs", float("nan")), ("jobs", [1]), ("weight", 0), ("weight", -1), ("weight", float("nan")), ("weight", float("inf")),
    ("weight", "nan"), ("weight", "inf"), ("weight", 2**63), ("weight", "1,5"), ("device_s", 0), ("device_s", float("nan")),
    ("device_s", float("inf")), ("device_s", "1e400"), ("money", -1), ("money", 2**63), ("stored_bytes", 2**63),
    ("stored_bytes", 0), ("payload_bytes", 0), ("payload_bytes", 2**63), ("connections", 0), ("connections", 2**63),
    ("subscriptions", -1), ("sessions", 0), ("slots", "9" * 5000), ("queued", 2**63),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_limit_that_is_none_is_refused_with_what_would_fit(name: str, value: Any) -> None:
    with pytest.raises(BadJob, match=f"^limit: {name} = .*(expected|out of range).*`none` takes the limit away") as caught:
        limits_of({name: value})
    assert len(str(caught.value)) < 250


async def test_a_wrong_limit_changes_nothing(operator: Tenants, server: EmbeddedServer) -> None:
    creds = (await operator.add("acme", limits_of({"jobs": "5", "weight": "2.5"}))).creds
    before = await operator.find("acme")
    assert before.limits == TenantLimits(jobs=5, weight=2.5)
    for given in ({"weight": 3, "jobs": 0}, {"weight": 3, "jbos": 1}):
        with pytest.raises(BadJob, match=r"limit: .*jbos.*did you mean 'jobs'|limit: jobs = 0"):
            await operator.limit("acme", given)
    assert await operator.find("acme") == before
    assert await admitted(server, creds)
    for label in ("x" * 65, "two\nlines"):
        with pytest.raises(BadJob, match="label: "):
            await operator.rotate("acme", label=label)
    assert await admitted(server, creds)


async def test_what_cannot_be_reached_is_said(tmp_path: Path) -> None:
    Authority.at(tmp_path)
    with pytest.raises(NexusError, match="no NATS server"):
        async with tenants_of("nats://127.0.0.1:1", tmp_path, timeout=0.3):
            pass


# Clocks


@pytest.mark.parametrize("off", [HOUR_S, -HOUR_S])
async def test_an_operator_whose_clock_is_an_hour_off_issues_what_is_good_as_long_as_was_asked(
    operator: Tenants, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, off: int
) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + off)
    creds = (await operator.add("acme", expires_s=600)).creds
    (key,) = (await operator.find("acme")).keys
    assert key.expires is not None
    assert abs(key.expires - real() - 600) < 60
    assert await admitted(server, creds)
    rotated = (await operator.rotate("acme", expires_s=600)).creds
    assert not await admitted(server, creds)
    assert await admitted(server, rotated)
    await operator.remove("acme")
    assert not await admitted(server, rotated)


async def test_when_the_servers_clock_goes_back_changes_still_count(
    operator: Tenants, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = HOUR_S

    async def clock(_: Bus) -> int:
        return int(time.time()) + off

    monkeypatch.setattr(tenants, "clock", clock)
    first = await operator.add("acme")
    issued = [first.record.issued]
    off = 0
    second = await operator.rotate("acme")
    third = await operator.rotate("acme")
    issued += [second.record.issued, third.record.issued, (await operator.suspend("acme")).issued]
    issued += [(await operator.activate("acme")).issued]
    assert issued == sorted(set(issued)), "no token is older than the one before"
    for old in (first, second):
        assert not await admitted(server, old.creds)
    assert await admitted(server, third.creds)
    server.stop()
    server.start()
    for old in (first, second):
        assert not await admitted(server, old.creds)
    assert await admitted(server, third.creds)


async def test_a_server_whose_clock_went_back_still_learns_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: EmbeddedServer
) -> None:
    """Of two tokens a starting server keeps the later one, by a clock that was wrong when it first started."""
    server.stop()
    real, calls = time.time, authority.CALLS
    with monkeypatch.context() as patched:
        patched.setattr(authority, "unix_now", lambda: int(real()) + DAY_S)
        patched.setattr(authority, "CALLS", tuple(call for call in calls if call.local != "account.show"))
        server.start()
        server.stop()
    server.start()
    connection = await Bus.connect(server.url, name="gateway-0")
    log: Any = connection.log
    try:
        await Gateway(Context("gateway", "gateway-0", connection, None, asyncio.Event(), Pulse(), log, "host")).open()
        async with tenants_of(server.url, server.authority) as found:
            client = await raw(server, (await found.add("acme")).creds)
        assert (await ask(client))["tenant"] == "acme"
        await client.close()
    finally:
        await connection.close()
