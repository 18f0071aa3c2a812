"""`nexus usage`, `audit`, `pause`, `resume` and the line of `jobs`, on a real server with a master."""

import asyncio
import csv
import io
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from nexus_bus.bus import Bus
from nexus_bus.clock import now
from nexus_bus.config import MasterConfig
from schemas.usage import Usage

Run = Callable[..., Awaitable[tuple[int, str, str]]]
DOCUMENT = """
kind = "sft"
name = "{name}"
environment = {{ id = "tabletop", task = "touch" }}
data = {{ expert = {{ episodes = 5 }} }}
"""


@pytest.fixture
def settings() -> MasterConfig:
    """One job at once, two in the line."""
    return MasterConfig(max_jobs=1, max_queued=2)


@pytest.fixture
async def used(bus: Bus) -> None:
    """What two tenants and the provider have on record."""
    for tenant, job, kind, seconds in [
        ("acme", "pick", "training", 10.0),
        ("acme", "pick", "inference", 2.0),
        ("globex", "place", "training", 4.0),
        ("provider", "idle", "training", 84.0),
    ]:
        entry = Usage(tenant=tenant, job=job, worker="w", kind=cast(Any, kind), device_s=seconds, requests=1, time=now())
        await bus.publish("usage", entry, msg_id=f"{tenant}/{job}/{kind}", tenant=tenant, job=job)


async def submit(nexus: Run, directory: Path, name: str) -> tuple[int, str, str]:
    path = directory / f"{name}.toml"
    path.write_text(DOCUMENT.format(name=name))
    return await nexus("submit", path)


async def test_a_tenant_sees_its_own_use_as_a_table_json_or_csv(nexus: Run, used: None) -> None:
    code, table, _ = await nexus("usage")
    assert code == 0
    assert [line.split()[:4] for line in table.splitlines()[1:]] == [
        ["acme", "pick", "inference", "2.00"],
        ["acme", "pick", "training", "10.00"],
    ]
    rows = json.loads((await nexus("usage", "--by", "job", "--format", "json"))[1])
    assert [(row["job"], row["device_s"]) for row in rows] == [("pick", 12.0)]
    assert rows == json.loads((await nexus("usage", "pick", "--by", "job", "--json"))[1])
    lines = list(csv.DictReader(io.StringIO((await nexus("usage", "--all", "--by", "tenant", "--format", "csv"))[1])))
    assert [(line["tenant"], float(line["device_s"])) for line in lines] == [("acme", 12), ("globex", 4), ("provider", 84)]
    assert "cost" not in lines[0]


async def test_prices_make_a_column_of_money(nexus: Run, used: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nexus.toml"
    file.write_text('[prices]\ncurrency = "EUR"\ndevice_s = 0.5\n')
    monkeypatch.setenv("NEXUS_CONFIG", str(file))
    rows = json.loads((await nexus("usage", "--all", "--by", "tenant", "--json"))[1])
    assert [(row["tenant"], row["cost"], row["currency"]) for row in rows] == [
        ("acme", 6.0, "EUR"),
        ("globex", 2.0, "EUR"),
        ("provider", 0.0, "EUR"),
    ]
    table = (await nexus("usage", "--all", "--by", "tenant"))[1].splitlines()
    assert table[0].split()[-1] == "EUR"
    assert table[-1].split() == ["total", "8.0000"]


async def test_days_that_are_over_are_left_out(nexus: Run, used: None) -> None:
    assert json.loads((await nexus("usage", "--since", "2999-01-01", "--json"))[1]) == []
    assert len(json.loads((await nexus("usage", "--by", "day", "--since", "2020-01-01", "--json"))[1])) >= 1


async def test_a_dimension_that_is_none_is_refused_with_those_that_are(nexus: Run) -> None:
    code, _, said = await nexus("usage", "--by", "tenant,week")
    assert code == 2
    assert "'week'" in said
    assert "tenant,job,kind,day" in said
    assert (await nexus("usage", "--by", "job,job"))[0] == 2
    assert (await nexus("usage", "--since", "yesterday"))[0] == 2


async def test_a_provider_who_finds_nothing_is_told_of_whom(nexus: Run, used: None, tmp_path: Path) -> None:
    for command in ("usage", "audit"):
        code, _, hint = await nexus(command, "--tenant", "nobody")
        assert (code, hint) == (0, "this is of 'nobody' alone; --tenant NAME is of another, --all of everybody\n")
    code, said, hint = await nexus("usage", "--tenant", "nobody", "--by", "tenant,kind", "--format", "csv")
    assert (code, len(said.splitlines())) == (0, 1)
    assert hint.startswith("this is of 'nobody' alone")
    assert (await nexus("usage"))[2] == ""
    assert (await nexus("usage", "--all", "--since", "2999-01-01"))[2] == ""


async def test_jobs_beyond_the_limit_wait_in_line_and_beyond_that_are_refused(nexus: Run, tmp_path: Path) -> None:
    assert [(await submit(nexus, tmp_path, name))[0] for name in ("a", "b", "c")] == [0, 0, 0]
    code, _, said = await submit(nexus, tmp_path, "d")
    assert code == 2
    assert "max_queued: 2 jobs of yours wait already, at most 2 may" in said
    jobs = {job["plan"]["spec"]["name"]: job for job in json.loads((await nexus("jobs", "--json"))[1])}
    assert {name: (job["phase"], job["queued"]) for name, job in jobs.items()} == {
        "a": ("data", 0),
        "b": ("waiting", 1),
        "c": ("waiting", 2),
    }
    assert jobs["c"]["reason"].startswith("max_jobs: at most 1 of your jobs may run at once; place 2 in the line")
    await nexus("cancel", "a")
    while json.loads((await nexus("jobs", "--json"))[1])[1]["phase"] == "waiting":
        await asyncio.sleep(0.02)
    while "place 1 in the line" not in (await nexus("jobs"))[1]:  # who is behind it hears of it a moment later
        await asyncio.sleep(0.02)


async def test_a_paused_job_gives_its_place_away_and_takes_one_again(nexus: Run, tmp_path: Path) -> None:
    await submit(nexus, tmp_path, "a")
    code, said, _ = await nexus("pause", "a", "--reason", "lunch")
    assert (code, said) == (0, "a is paused: lunch\n")
    await submit(nexus, tmp_path, "b")
    code, _, said = await nexus("resume", "a")
    assert code == 2
    assert "max_jobs: at most 1 of your jobs" in said
    await nexus("pause", "b")
    assert (await nexus("resume", "a"))[:2] == (0, "a goes on with data\n")
    assert (await nexus("resume", "a"))[0] == 2, "it does not rest any more"
    assert (await nexus("pause", "nobody"))[0] == 2


async def test_every_decision_is_on_record(nexus: Run, tmp_path: Path) -> None:
    for name in ("a", "b"):
        await submit(nexus, tmp_path, name)
    await submit(nexus, tmp_path, "a")
    await nexus("pause", "a", "--reason", "lunch")
    await nexus("resume", "a")
    await nexus("cancel", "b", "--reason", "enough")
    while "cancelled" not in (await nexus("audit", "--job", "b"))[1]:
        await asyncio.sleep(0.02)
    entries = json.loads((await nexus("audit", "--json"))[1])
    asked = [(entry["action"], entry["job"]) for entry in entries if entry["outcome"] == "asked"]
    assert asked == [
        *(("job.submit", "a"), ("job.submit", "b"), ("job.submit", "a")),
        *(("job.pause", "a"), ("job.resume", "a"), ("job.cancel", "b")),
    ]
    decided = [(entry["action"], entry["job"], entry["outcome"]) for entry in entries if entry["outcome"] != "asked"]
    assert decided == [
        ("submit", "a", "accepted"),
        ("submit", "b", "accepted"),
        ("submit", "b", "queued"),
        ("submit", "a", "refused"),
        ("pause", "a", "ok"),
        ("resume", "a", "ok"),
        ("cancelled", "b", "ok"),
    ]
    assert {entry["tenant"] for entry in entries} == {"acme"}
    assert entries[-1]["detail"] == "enough"
    assert [entry["job"] for entry in json.loads((await nexus("audit", "--job", "b", "--json"))[1])] == ["b"] * 5
    assert json.loads((await nexus("audit", "--tenant", "globex", "--json"))[1]) == []
    assert json.loads((await nexus("audit", "--since", "2999-01-01", "--json"))[1]) == []
    assert len((await nexus("audit", "--all"))[1].splitlines()) == 1 + len(entries)
