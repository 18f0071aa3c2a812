"""A tenant's own limits, live: whom they refuse, let wait and let rest, what each is told, and who goes on by itself."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nexus_bus import registry
from nexus_bus.bus import Bus, Retry
from nexus_bus.ledger import Ledger
from nexus_bus.plan import compile_plan
from nexus_bus.pricing import Prices
from nexus_bus.spending import Account, Spending
from nexus_bus.stored import Keeping
from schemas.base import BlobRef
from schemas.job import JobPause, JobResume, JobSpec
from schemas.plan import JobState
from schemas.policy import PolicyImport, PolicyVersion, TrainingState
from schemas.tenant import TenantLimits
from schemas.usage import Usage
from tests.conftest import Eventually
from tests.unit.mastering import allow, decisions, evaluation, events, job, keep, looks, master, phases, sft, use
from workers import master as role
from workers.master import Master


async def submit(served: Master, *specs: JobSpec) -> None:
    for spec in specs:
        await served.submit(spec, "acme", f"s/{spec.name}")


def dataset(name: str, size: int) -> JobState:
    """A finished job that left so many bytes of recorded data."""
    plan = compile_plan(sft(name), "acme")
    return JobState(plan=plan, phase="completed", submission=name, submitted="now", dataset_bytes=size, closed=True)


# Places


async def test_limits_of_ones_own_go_before_the_services_and_count_at_the_next_look(bus: Bus) -> None:
    served = master(bus, max_jobs=1, max_queued=1)
    await allow(bus, served, jobs=2, queued=2)
    await submit(served, *(sft(name) for name in "abcde"))
    assert await phases(bus, "abcd") == ["data", "data", "waiting", "waiting"]
    assert (await job(bus, "c")).reason.startswith("limits.jobs: at most 2 of your jobs may run at once; place 1")
    refused = (await events(bus, "e"))[-1]
    assert (refused.type, refused.message[:40]) == ("job.refused", "limits.queued: 2 jobs of yours wait alre")
    await allow(bus, served, jobs=3)
    await looks(served)
    assert await phases(bus, "cd") == ["data", "waiting"]
    await allow(bus, served, jobs=1)
    await looks(served)
    assert await phases(bus, "abcd") == ["data", "data", "data", "waiting"], "what runs is left to end"
    await submit(served, sft("f"))
    assert (await events(bus, "f"))[-1].message.startswith("max_queued: 1 jobs"), "a limit that was lifted is the service's"


async def test_training_jobs_wait_for_a_slot_and_evaluations_pass_them(bus: Bus) -> None:
    await keep(bus)
    served = master(bus)
    await allow(bus, served, slots=1)
    await submit(served, sft("a"), sft("b"), evaluation("c"))
    assert await phases(bus, "abc") == ["data", "waiting", "evaluating_after"]
    state = await job(bus, "b")
    assert (state.limit, state.queued) == ("slots", 1)
    why = "limits.slots: at most 1 of your training jobs may run at once; place 1 in the line, in about"
    assert state.reason.startswith(why)
    await served.pausing.handle(JobPause(job="a"), "acme", "p")
    await looks(served)
    assert (await job(bus, "b")).phase == "data", "a job that rests gives its slot up"
    await served.pausing.handle(JobResume(job="a"), "acme", "r")
    assert (await events(bus, "a"))[-1].message.startswith("limits.slots: at most 1 of your training jobs may run")
    await served.states.end("acme", "b", "cancelled", "enough")
    await served.pausing.handle(JobResume(job="a"), "acme", "r2")
    assert (await job(bus, "a")).phase == "data"


# Budgets of a tenant


async def test_at_the_end_of_the_device_seconds_all_jobs_rest_and_more_of_them_let_all_go_on(
    bus: Bus, eventually: Eventually
) -> None:
    await keep(bus)
    served = master(bus)
    await submit(served, sft("a"), evaluation("b"), sft("c", device_s=1000.0), sft("d"))
    await served.pausing.handle(JobPause(job="d"), "acme", "p")
    await use(bus, 6.0, "a")
    await use(bus, 3.0, "gone", "inference")  # a job that ended long ago: the budget is one of all time
    await use(bus, 500.0, "b", "environment")  # no device of the provider's
    await allow(bus, served, device_s=10.0)
    await looks(served)
    assert await phases(bus, "abc") == ["data", "evaluating_after", "data"], "there is some left"
    await use(bus, 2.0, "c")
    await eventually(lambda: served.quotas.spending.of("acme").device_s == 11.0)
    for _ in range(3):
        await served.tick()
    assert await phases(bus, "abcd") == ["paused"] * 4
    why = "limits.device_s: 11.0 of your 10 s are used; ask the provider for more"
    for name in "abc":
        state = await job(bus, name)
        assert (state.limit, state.reason) == ("device_s", f"{why}; it goes on by itself once it may")
        paused = [event for event in await events(bus, name) if event.type == "job.paused"]
        assert [event.message for event in paused] == [state.reason], "it is said once"
    assert "rollout.run.acme.b" not in await bus.queued("ROLLOUT"), "nobody begins an episode"
    await submit(served, evaluation("e"))
    assert (await job(bus, "e")).reason == f"{why}; place 1 in the line"
    await served.pausing.handle(JobResume(job="a"), "acme", "r")
    assert (await events(bus, "a"))[-1].message == why
    await allow(bus, served, device_s=12.0)
    await looks(served)
    assert await phases(bus, "abcde") == ["data", "evaluating_after", "data", "paused", "evaluating_after"]
    assert (await job(bus, "d")).reason == "paused by the provider", "whom somebody let rest, somebody lets go on"
    assert (await events(bus, "b"))[-1].message == "your limits allow it again: it goes on with evaluating_after"
    assert (await bus.queued("ROLLOUT"))["rollout.run.acme.b"] == 3
    outcomes = [(entry.job, entry.outcome) for entry in await decisions(bus) if entry.action == "limit"]
    assert sorted(outcomes) == sorted([("a", "ok"), ("b", "ok"), ("c", "ok")] * 2)


async def test_a_budget_that_is_lifted_lets_jobs_go_on(bus: Bus) -> None:
    served = master(bus)
    await submit(served, sft("a"))
    await use(bus, 6.0, "a")
    await allow(bus, served, device_s=5.0)
    await looks(served)
    assert await phases(bus, "a") == ["paused"]
    await allow(bus, served)
    await looks(served)
    assert ((await job(bus, "a")).phase, (await job(bus, "a")).limit, (await job(bus, "a")).reason) == ("data", "", "")


async def test_a_master_that_is_started_anew_begins_nothing_before_it_has_counted(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = master(bus, max_jobs=1)
    await submit(served, sft("a"), sft("b"))
    for i in range(300):
        await use(bus, 1.0 + i / 1000, "a")
    await allow(bus, served, device_s=100.0)
    await looks(served)
    assert await phases(bus, "ab") == ["paused", "waiting"]
    counting, read = asyncio.Event(), Spending._follow

    async def slowly(*args: Any) -> None:
        await counting.wait()
        await read(*args)

    monkeypatch.setattr(Spending, "_follow", slowly)
    fresh = master(bus, max_jobs=5)
    await allow(bus, fresh, device_s=100.0)
    for _ in range(3):
        await fresh.tick()
    await submit(fresh, sft("c"))
    assert await phases(bus, "abc") == ["paused", "waiting", "waiting"]
    counting.set()
    await looks(fresh)
    assert await phases(bus, "abc") == ["paused", "waiting", "waiting"]
    assert (await job(bus, "c")).limit == "device_s"
    assert fresh.quotas.spending.of("acme").device_s == pytest.approx(300 + sum(i / 1000 for i in range(300)))
    await allow(bus, fresh, device_s=1000.0)
    await looks(fresh)
    assert await phases(bus, "abc") == ["data"] * 3


async def test_what_a_limit_let_rest_goes_on_before_those_in_the_line_and_one_after_another(bus: Bus) -> None:
    served = master(bus, max_jobs=2)
    await submit(served, sft("a"), sft("b"))
    await use(bus, 6.0, "a")
    await allow(bus, served, device_s=5.0)
    await looks(served)
    await submit(served, sft("c", priority=100))
    await allow(bus, served, device_s=50.0, jobs=1)
    await looks(served)
    assert await phases(bus, "abc") == ["data", "paused", "waiting"]
    assert ((await job(bus, "b")).limit, (await job(bus, "c")).limit) == ("jobs", "jobs"), "each says what it waits for now"
    await served.states.end("acme", "a", "cancelled", "enough")
    assert await phases(bus, "bc") == ["data", "waiting"]


async def test_a_tenant_takes_a_job_over_that_rests_because_of_a_limit(bus: Bus) -> None:
    served = master(bus)
    await submit(served, sft("a"))
    await use(bus, 6.0, "a")
    await allow(bus, served, device_s=5.0)
    await looks(served)
    await served.pausing.handle(JobPause(job="a", reason="not before Monday"), "acme", "p")
    await allow(bus, served)
    await looks(served)
    state = await job(bus, "a")
    assert (state.phase, state.limit, state.reason) == ("paused", "", "not before Monday")
    await served.pausing.handle(JobResume(job="a"), "acme", "r")
    assert await phases(bus, "a") == ["data"]


async def test_a_jobs_own_budget_waits_for_the_tenant_whatever_the_provider_does(bus: Bus, eventually: Eventually) -> None:
    served = master(bus)
    await submit(served, sft("a", device_s=1.0))
    await use(bus, 6.0, "a")
    await served.tick()
    await eventually(lambda: served.quotas.spending.of("acme", "a").device_s == 6.0)
    await served.tick()
    await allow(bus, served, device_s=5.0)
    await looks(served)
    await allow(bus, served)
    await looks(served)
    state = await job(bus, "a")
    assert (state.phase, state.limit) == ("paused", "")
    assert state.reason.startswith("budget.device_s: 6.0 of 1 s")


# Money


@pytest.fixture
def prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nexus.toml"
    file.write_text('[prices]\ncurrency = "EUR"\ndevice_s = 0.5\nsession_s = 0.01\nstored_gb_day = 1.0\n')
    monkeypatch.setenv("NEXUS_CONFIG", str(file))


@pytest.mark.usefixtures("prices")
async def test_money_is_device_time_sessions_and_storage(bus: Bus, eventually: Eventually) -> None:
    served = master(bus)
    await submit(served, sft("a"))
    await allow(bus, served, money=10.0)
    await use(bus, 6.0, "a")  # 3 EUR
    await use(bus, 0.0, "a", "environment", session_s=300.0)  # 3 EUR
    two_days_ago = (datetime.now(UTC) - timedelta(days=2)).isoformat()
    await use(bus, 0.0, "a", "storage", stored_bytes=1_000_000_000, time=two_days_ago)  # 2 EUR by now
    await looks(served)
    assert await phases(bus, "a") == ["data"]
    await use(bus, 5.0, "a", "inference")
    await eventually(lambda: served.quotas.spending.of("acme").device_s == 11.0)
    await served.tick()
    assert (await job(bus, "a")).reason.startswith("limits.money: 10.50 of your 10 EUR are used; ask the provider for more")
    await allow(bus, served, money=11.0)
    await looks(served)
    assert await phases(bus, "a") == ["data"]


async def test_without_prices_nothing_costs_anything(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEXUS_CONFIG", raising=False)
    served = master(bus)
    await submit(served, sft("a"))
    await use(bus, 1e9, "a")
    await allow(bus, served, money=1e-6)
    await looks(served)
    assert await phases(bus, "a") == ["data"]


def test_the_limit_and_the_bill_count_alike() -> None:
    prices = Prices(currency="EUR", device_s=0.5, session_s=0.01, stored_gb_day=0.3)
    start, ledger, account = datetime(2026, 11, 1, 7, tzinfo=UTC), Ledger(("tenant",), prices=prices), Account()
    ledger.until = start + timedelta(days=9)
    for i in range(200):
        kind: Any = ("training", "inference", "environment", "storage")[i % 4]
        used = Usage(
            tenant="acme", job=f"j{i % 3}", worker="w", kind=kind, time=(start + timedelta(hours=i)).isoformat(),
            device_s=i / 7 if i % 4 < 2 else 0.0, session_s=float(i) if kind == "environment" else 0.0,
            stored_bytes=i * 10_000_000 if kind == "storage" else 0,
        )  # fmt: skip
        ledger.take(used)
        account.take(used)
    assert account.cost(prices, ledger.until) == pytest.approx(ledger.rows()[0]["cost"], rel=1e-9)


# Storage


async def test_a_full_store_lets_training_rest_and_evaluations_go_on(bus: Bus, eventually: Eventually) -> None:
    await keep(bus, 0, size=600)
    await keep(bus, 1, size=5000, retired="2026-11-01T00:00:00+00:00", purged=True)  # lies there no more
    await bus.kv("registry").put(registry.job_key("acme", "old"), dataset("old", 300))
    served = master(bus)
    await allow(bus, served, stored_bytes=1000)
    await submit(served, sft("a"), evaluation("b"))
    await looks(served)
    assert await phases(bus, "ab") == ["data", "evaluating_after"]
    state = TrainingState(
        tenant="acme", job="a", step=1, batches=1, records=1, version=0, epoch=1, state=BlobRef(sha256="9" * 64, size=100)
    )
    await bus.kv("registry").put(registry.state_key("acme", "a"), state)
    await eventually(lambda: served.quotas.keeping.of("acme").size() == 700)
    await served.tick()
    assert await phases(bus, "ab") == ["paused", "evaluating_after"]
    assert (await job(bus, "a")).reason.startswith(
        "limits.stored_bytes: 1,000 of your 1,000 bytes are kept; keep fewer versions"
    )
    await submit(served, sft("c"), evaluation("d"))
    assert await phases(bus, "cd") == ["waiting", "evaluating_after"]
    assert (await job(bus, "c")).limit == "stored_bytes"
    version = await bus.kv("registry").get(registry.policy_key("acme", "kept", 0), PolicyVersion)
    assert version is not None
    order = PolicyImport(name="mine", contract=version.value.contract, weights=BlobRef(sha256="8" * 64, size=1))
    await served.policy(order, "acme", "i")
    refused = (await events(bus, "mine"))[-1]
    assert (refused.type, refused.message[:42]) == ("policy.refused", "limits.stored_bytes: 1,000 of your 1,000 b")
    fresh = master(bus)
    await allow(bus, fresh, stored_bytes=1000)
    assert isinstance(await fresh.policy(order, "acme", "i2"), Retry), "it has not counted yet what is kept"
    purged = msgspec.structs.replace(version.value, retired="2026-11-01T00:00:00+00:00", purged=True)
    await bus.kv("registry").put(registry.policy_key("acme", "kept", 0), purged)
    await eventually(lambda: served.quotas.keeping.of("acme").size() == 100)
    await served.tick()
    assert await phases(bus, "ac") == ["data", "data"]


async def test_the_same_content_of_a_job_is_counted_once_and_what_is_deleted_no_more(bus: Bus, eventually: Eventually) -> None:
    kv, keeping = bus.kv("registry"), Keeping(bus)
    await keep(bus, 0, size=100, adapter=BlobRef(sha256="7" * 64, size=10))
    await keep(bus, 1, size=100, adapter=BlobRef(sha256="7" * 64, size=10))
    await eventually(lambda: keeping.of("acme").known)
    assert keeping.of("acme").size() == 210
    await kv.delete(registry.policy_key("acme", "kept", 1))
    await eventually(lambda: keeping.of("acme").size() == 110)
    assert keeping.of("globex").size() == 0


# Suspension


async def test_a_suspended_tenants_jobs_rest_and_new_ones_are_refused_until_it_is_active_again(bus: Bus) -> None:
    await keep(bus)
    served = master(bus, max_jobs=2)
    await submit(served, sft("a"), evaluation("b"), sft("c"))
    await allow(bus, served, phase="suspended", reason="the invoice of October is open")
    await looks(served)
    assert await phases(bus, "abc") == ["paused", "paused", "waiting"]
    why = "suspended by the provider: the invoice of October is open"
    assert (await job(bus, "a")).reason == f"{why}; it goes on by itself once it may"
    assert (await job(bus, "c")).reason == f"{why}; place 1 in the line"
    await submit(served, sft("d"))
    assert ((await events(bus, "d"))[-1].type, (await events(bus, "d"))[-1].message) == ("job.refused", why)
    await served.pausing.handle(JobResume(job="a"), "acme", "r")
    assert (await events(bus, "a"))[-1].message == why
    await allow(bus, served)
    await looks(served)
    assert await phases(bus, "abc") == ["data", "evaluating_after", "waiting"]
    assert (await job(bus, "c")).limit == "jobs"


async def test_a_tenant_that_was_removed_gets_no_new_job(bus: Bus) -> None:
    served = master(bus)
    await allow(bus, served, phase="removed", reason="as agreed", device_s=1.0)
    await submit(served, sft("a"))
    assert ((await events(bus, "a"))[-1].type, (await events(bus, "a"))[-1].message) == (
        "job.refused", "removed by the provider: as agreed",
    )  # fmt: skip


async def test_another_tenant_goes_on(bus: Bus) -> None:
    served = master(bus)
    await served.submit(sft("a"), "globex", "s/globex")
    await submit(served, sft("a"))
    await allow(bus, served, phase="suspended")
    await looks(served)
    other = await bus.kv("registry").get(registry.job_key("globex", "a"), JobState)
    assert other is not None
    assert (other.value.phase, await phases(bus, "a")) == ("data", ["paused"])


# The role as it runs


async def test_a_running_master_follows_what_the_provider_sets(bus: Bus, eventually: Eventually) -> None:
    context = master(bus).context
    serving = asyncio.create_task(role.main(context))
    await bus.publish("job.submit", sft("a"), msg_id="a", tenant="acme")

    async def reaches(phase: str) -> None:
        async def reached() -> bool:
            entry = await bus.kv("registry").get(registry.job_key("acme", "a"), JobState)
            return entry is not None and entry.value.phase == phase

        await eventually(reached)

    await reaches("data")
    await allow(bus, phase="suspended")
    await reaches("paused")
    await allow(bus)
    await reaches("data")
    context.stop.set()
    await serving


# Limits that are none


@pytest.mark.parametrize("field", TenantLimits.__struct_fields__)
@pytest.mark.parametrize("value", [0, -1, 2**63, float("nan"), float("inf"), True, "5"])
def test_a_limit_that_is_none_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match=rf"- at `\$\.{field}`$|, got .* - at `\$\.{field}`$"):
        msgspec.convert({field: value}, TenantLimits)
