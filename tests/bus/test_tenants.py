"""Tenants of a server that runs: every change counts at once, over restarts too, and nobody else notices."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from bus_examples import example
from msgspec.structs import replace
from nats.aio.client import Client as Raw
from nats.errors import Error as NatsError
from tenancy import admitted, ask, raw, written

from nexus_bus import registry, tenants
from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.bus.accounts import push
from nexus_bus.client import Client
from nexus_bus.config import MasterConfig
from nexus_bus.errors import BadJob, Denied, NotFound, Unavailable
from nexus_bus.tenants import Tenants, limits_of, tenants_of
from nexus_bus.worker import Context, Pulse
from schemas.policy import PolicyVersion, TrainingState
from schemas.tenant import TenantLimits, TenantRecord
from tests.conftest import Eventually
from workers import master
from workers.gateway import Gateway


@pytest.fixture
async def operator(server: EmbeddedServer, gateway: Gateway) -> AsyncIterator[Tenants]:
    """What an operator has in hand."""
    async with tenants_of(server.url, server.authority) as found:
        yield found


class Neighbour:
    """Another tenant, which asks all the time."""

    def __init__(self, client: Raw) -> None:
        self.client = client
        self.answers = 0
        self.failures: list[str] = []

    async def pump(self) -> None:
        while True:
            try:
                assert (await ask(self.client))["tenant"] == "globex"
                self.answers += 1
            except (NatsError, AssertionError) as error:
                self.failures.append(repr(error))
                return


@pytest.fixture
async def neighbour(operator: Tenants, server: EmbeddedServer, eventually: Eventually) -> AsyncIterator[Neighbour]:
    """None of its requests fails, whatever happens to others meanwhile."""
    creds = (await operator.add("globex")).creds
    found = Neighbour(await raw(server, creds))
    pumps = [asyncio.create_task(found.pump()) for _ in range(4)]
    await eventually(lambda: found.answers or found.failures)
    yield found
    before = found.answers
    await eventually(lambda: found.answers > before + 20 or found.failures)
    for pump in pumps:
        pump.cancel()
    assert found.failures == []
    await found.client.close()


async def test_a_new_tenant_may_begin_at_once(operator: Tenants, server: EmbeddedServer, neighbour: Neighbour) -> None:
    issued = await operator.add("acme", limits_of({"weight": 2}), label="laptop")
    client = await raw(server, issued.creds)
    account = await ask(client)
    assert (account["tenant"], account["limits"]["weight"]) == ("acme", 2)
    assert [key["label"] for key in account["keys"]] == ["laptop"]
    await client.close()
    assert [record.name for record in await operator.all()] == ["acme", "globex"]
    with pytest.raises(BadJob, match=r"'acme' exists since .*`nexus tenant rotate acme`"):
        await operator.add("acme")


async def test_limits_count_from_the_moment_they_are_set(
    operator: Tenants, server: EmbeddedServer, neighbour: Neighbour, eventually: Eventually
) -> None:
    creds = (await operator.add("acme")).creds
    clients = [await raw(server, creds) for _ in range(3)]
    await operator.limit("acme", {"connections": 1, "jobs": 3})
    await eventually(lambda: sum(client.is_connected for client in clients) == 1)
    assert not await admitted(server, creds)
    with pytest.raises(Denied, match="as many connections as this tenant may have"):
        await Bus.connect(server.url, creds=written(server, creds))
    await operator.limit("acme", {"connections": None, "jobs": None})
    client = await raw(server, creds)
    assert "jobs" not in (await ask(client)).get("limits", {})
    await client.close()
    for one in clients:
        await one.close()


async def test_rotated_credentials_replace_those_before(
    operator: Tenants, server: EmbeddedServer, neighbour: Neighbour, eventually: Eventually
) -> None:
    old = (await operator.add("acme")).creds
    client = await raw(server, old)
    new = (await operator.rotate("acme", label="new")).creds
    await eventually(lambda: client.is_closed)
    assert not await admitted(server, old)
    assert await admitted(server, new)
    kept = (await operator.rotate("acme", keep=True)).creds
    assert await admitted(server, new)
    assert await admitted(server, kept)
    assert len((await operator.find("acme")).keys) == 2


async def test_one_key_is_revoked_by_its_label_or_by_itself(
    operator: Tenants, server: EmbeddedServer, neighbour: Neighbour, eventually: Eventually
) -> None:
    first = await operator.add("acme", label="laptop")
    second = await operator.rotate("acme", label="cluster", keep=True)
    third = await operator.rotate("acme", keep=True)
    clients = [await raw(server, one.creds) for one in (first, second, third)]
    await operator.revoke("acme", "laptop")
    await eventually(lambda: clients[0].is_closed)
    assert not await admitted(server, first.creds)
    await operator.revoke("acme", second.record.keys[-1].key)
    await eventually(lambda: clients[1].is_closed)
    assert (await ask(clients[2]))["tenant"] == "acme"
    for nobody in ("laptop", "", "UNKNOWN"):  # nor does the empty label mean those without one
        with pytest.raises(NotFound, match=r"`nexus tenant show acme` lists its keys"):
            await operator.revoke("acme", nobody)
    assert (await ask(clients[2]))["tenant"] == "acme"
    await clients[2].close()


async def test_who_is_suspended_is_cut_off_and_goes_on_with_the_same_credentials(
    operator: Tenants, server: EmbeddedServer, neighbour: Neighbour, eventually: Eventually
) -> None:
    creds = (await operator.add("acme")).creds
    client = await raw(server, creds)
    await operator.suspend("acme", "unpaid")
    await eventually(lambda: client.is_closed)
    assert not await admitted(server, creds)
    assert (await operator.find("acme")).reason == "unpaid"
    await operator.activate("acme")
    client = await raw(server, creds)
    assert (await ask(client))["tenant"] == "acme"
    await client.close()


async def test_who_was_removed_is_gone_and_its_name_is_never_given_again(
    operator: Tenants, server: EmbeddedServer, bus: Bus, neighbour: Neighbour, eventually: Eventually
) -> None:
    creds = (await operator.add("acme")).creds
    client = await raw(server, creds)
    await operator.remove("acme")
    await eventually(lambda: client.is_closed)
    assert not await admitted(server, creds)
    record = await operator.find("acme")
    assert (record.phase, record.keys, len(record.revoked)) == ("removed", [], 1)
    with pytest.raises(BadJob, match=r"'acme' was removed on .* choose another"):
        await operator.add("acme")
    for again in (operator.remove, operator.rotate, operator.activate, operator.suspend):
        with pytest.raises(NotFound, match="'acme' was removed"):
            await again("acme")
    actions = [item.message.action async for item in bus.tail("audit", follow=False, tenant="acme")]
    assert actions == ["tenant.add", "tenant.suspend", "tenant.remove"]


# Two operators


async def test_of_two_who_add_the_same_tenant_at_once_one_wins(operator: Tenants, server: EmbeddedServer) -> None:
    async with tenants_of(server.url, server.authority) as other:
        for name in ("a", "b", "c", "d"):
            both = await asyncio.gather(operator.add(name), other.add(name), return_exceptions=True)
            (lost,) = (one for one in both if isinstance(one, BaseException))
            (won,) = (one for one in both if not isinstance(one, BaseException))
            assert isinstance(lost, BadJob)
            assert f"{name!r} exists since" in str(lost)
            assert await admitted(server, won.creds)
            assert (await operator.find(name)).keys == won.record.keys


async def test_what_two_change_at_once_holds_in_the_end(
    operator: Tenants, server: EmbeddedServer, eventually: Eventually
) -> None:
    creds = (await operator.add("acme")).creds
    async with tenants_of(server.url, server.authority) as other:
        changes = [{"connections": 2}, {"jobs": 7}, {"weight": 3}, {"slots": 2}, {"subscriptions": 9}]
        await asyncio.gather(*(one.limit("acme", change) for one in (operator, other) for change in changes))
    record = await operator.find("acme")
    assert record.limits == TenantLimits(connections=2, jobs=7, weight=3, slots=2, subscriptions=9)
    assert len({record.issued, (await operator.limit("acme", {"jobs": 8})).issued}) == 2
    clients = [await raw(server, creds) for _ in range(2)]
    assert not await admitted(server, creds)
    for client in clients:
        await client.close()


async def test_a_copy_of_the_registry_that_is_behind_does_not_bring_old_keys_back(
    operator: Tenants, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cluster whatever server is asked may lag behind what was just written."""
    creds = (await operator.add("acme", label="laptop")).creds
    behind = await operator.kv.get(registry.account_key("acme"), TenantRecord)

    async def get(*_: object) -> Any:
        return behind

    monkeypatch.setattr(operator.kv, "get", get)
    await operator.revoke("acme", "laptop")
    assert not await admitted(server, creds)


async def test_who_was_interrupted_is_made_good_by_the_next_command(
    operator: Tenants, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:

        async def lost(*_: object) -> None:
            raise Unavailable("the server went away")

        patched.setattr(tenants, "push", lost)
        with pytest.raises(Unavailable):
            await operator.add("acme")
    assert await admitted(server, (await operator.rotate("acme")).creds)


# Restarts


async def test_accounts_limits_revocations_and_removals_outlive_the_server(
    operator: Tenants, server: EmbeddedServer, crash: Any, eventually: Eventually
) -> None:
    creds = {name: (await operator.add(name)).creds for name in ("acme", "globex", "initech", "hooli")}
    await operator.limit("acme", {"connections": 1})
    rotated = (await operator.rotate("globex")).creds
    await operator.suspend("initech")
    await operator.remove("hooli")

    async def holds() -> None:
        client = await raw(server, creds["acme"])
        assert not await admitted(server, creds["acme"]), "one connection is all it may have"
        await client.close()
        assert await admitted(server, rotated)
        assert [await admitted(server, creds[name]) for name in ("globex", "initech", "hooli")] == [False, False, False]

    await holds()
    for end in (server.stop, crash.kill):
        end()
        server.start()
        await holds()
    await eventually(lambda: operator.bus.up.is_set() and operator.system.up.is_set())
    await operator.activate("initech")
    assert await admitted(server, creds["initech"])


# Removal with jobs


@pytest.fixture
async def working(server: EmbeddedServer, bus: Bus, gateway: Gateway) -> AsyncIterator[None]:
    """A master."""
    log: Any = bus.log
    connection = await Bus.connect(server.url, name="master-0")
    context = Context("master", "master-0", connection, MasterConfig(), asyncio.Event(), Pulse(), log, "host")
    task = asyncio.create_task(master.main(context))
    yield
    context.stop.set()
    await task
    await connection.close()


def document(name: str) -> dict[str, Any]:
    return {
        "kind": "sft", "name": name, "environment": {"id": "tabletop", "task": "touch"}, "data": {"expert": {"episodes": 5}},
    }  # fmt: skip


async def test_a_tenant_with_running_jobs_is_refused_and_keeps_them(
    operator: Tenants, server: EmbeddedServer, working: None
) -> None:
    creds = (await operator.add("acme")).creds
    async with await Client.connect(server.url, creds=written(server, creds)) as client:
        await client.submit(document("pick"))
        await client.submit(document("place"))
        with pytest.raises(BadJob, match=r"acme has jobs that have not ended: pick, place; cancel them, or .* --force"):
            await operator.remove("acme")
        assert (await operator.find("acme")).phase == "active"
        assert [job.phase for job in await client.jobs()] == ["data", "data"]


async def test_a_job_that_comes_while_a_tenant_is_removed_is_kept_too(
    operator: Tenants, server: EmbeddedServer, working: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    creds = (await operator.add("acme")).creds
    async with await Client.connect(server.url, creds=written(server, creds)) as client:
        suspend = operator.suspend

        async def late(*given: Any) -> TenantRecord:
            await client.submit(document("late"))
            return await suspend(*given)

        monkeypatch.setattr(operator, "suspend", late)
        with pytest.raises(BadJob, match="jobs that have not ended: late"):
            await operator.remove("acme")
    assert (await operator.find("acme")).phase == "active"
    assert await admitted(server, creds)


async def test_by_force_jobs_end_first_and_what_was_used_stays_on_record(
    operator: Tenants, server: EmbeddedServer, bus: Bus, working: None, neighbour: Neighbour
) -> None:
    creds = (await operator.add("acme")).creds
    async with await Client.connect(server.url, creds=written(server, creds)) as client:
        await client.submit(document("pick"))
        await client.submit(document("place"))
    await operator.remove("acme", force=True)
    assert not await admitted(server, creds)
    kv = bus.kv("registry")
    assert [key for key in await kv.keys() if ".acme" in key] == ["account.acme"]
    assert await bus.queued("ROLLOUT", "*.*.acme.>") == {}
    assert [name for names in (await bus.depths()).values() for name in names if "acme" in name] == []
    entries = [item.message async for item in bus.tail("audit", follow=False, tenant="acme")]
    ended = sorted(entry.job for entry in entries if entry.action == "cancelled")
    assert ended == ["pick", "place"]
    assert entries[-1].action == "tenant.remove"


async def test_what_a_removed_tenant_learned_is_deleted_unless_it_is_somebody_elses_too(
    operator: Tenants, bus: Bus, eventually: Eventually
) -> None:
    log: Any = bus.log
    context = Context("master", "master-0", bus, MasterConfig(), asyncio.Event(), Pulse(), log, "host")
    serving = master.Master(context)
    serving.policies.grace_s = 0.0
    following = asyncio.create_task(serving.quotas.allowances.follow())
    await serving.policies.sweep()  # it knows by now that nothing is to be deleted
    await operator.add("acme")
    own, shared, state = [await bus.blobs.put(content) for content in (b"own", b"shared", b"state")]
    version, trained = example(PolicyVersion, full=False), example(TrainingState, full=False)
    for tenant, n, weights in (("acme", 0, own), ("acme", 1, shared), ("globex", 0, shared)):
        one = replace(version, id=f"pick@{n}", tenant=tenant, job="pick", n=n, weights=weights)
        await bus.kv("registry").create(registry.policy_key(tenant, "pick", n), one)
    trained = replace(trained, tenant="acme", job="pick", state=state)
    await bus.kv("registry").create(registry.state_key("acme", "pick"), trained)
    await operator.remove("acme")

    async def gone() -> bool:
        await serving.policies.sweep()
        try:
            await bus.blobs.get(own)
        except NotFound:
            return True
        return False

    await eventually(gone)
    assert await bus.blobs.get(shared) == b"shared"
    with pytest.raises(NotFound):
        await bus.blobs.get(state)
    following.cancel()


async def test_without_a_master_nothing_is_removed_that_might_still_run(operator: Tenants, server: EmbeddedServer) -> None:
    creds = (await operator.add("acme")).creds
    async with await Client.connect(server.url, creds=written(server, creds)) as client:
        with pytest.raises(Unavailable, match="no answer from a master"):
            await client.submit(document("pick"), timeout=3.0)
    with pytest.raises(BadJob, match=r"orders in the queue of acme .*is a master running"):
        await operator.remove("acme", drain_s=0.2)
    assert (await operator.find("acme")).phase == "active"
    assert await admitted(server, creds)


async def test_whoever_is_interrupted_while_removing_removes_it_again(
    operator: Tenants, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    creds = (await operator.add("acme")).creds
    with monkeypatch.context() as patched:

        async def lost(*_: object) -> None:
            raise Unavailable("the server went away")

        patched.setattr(operator, "_erase", lost)
        with pytest.raises(Unavailable):
            await operator.remove("acme")
    record = await operator.find("acme")
    assert (record.phase, record.reason) == ("suspended", "is being removed")
    assert not await admitted(server, creds)
    assert (await operator.remove("acme")).phase == "removed"


async def test_a_server_that_was_told_otherwise_is_told_again(operator: Tenants) -> None:
    record = (await operator.add("acme")).record
    assert await operator.refresh() == []
    other = replace(record, limits=TenantLimits(connections=1), issued=record.issued + 1)
    await push(operator.system, operator.authority.tenant_token(other))  # as an older version might have left it
    assert await operator.refresh() == ["acme"]
    assert await operator.refresh() == []
