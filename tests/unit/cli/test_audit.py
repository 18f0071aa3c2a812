"""`nexus audit`: who did what, under which key, whoever it was: the provider, the operator, a tenant."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nexus_bus import registry
from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.bus.jwt import read_creds
from nexus_bus.clock import now
from schemas.control import DeadLetter
from schemas.plan import JobState

Run = Callable[..., Awaitable[tuple[int, str, str]]]
DOCUMENT = """
kind = "sft"
name = "{name}"
environment = {{ id = "tabletop", task = "touch" }}
data = {{ expert = {{ episodes = 5 }} }}
"""


@pytest.fixture
def provider(server: EmbeddedServer) -> str:
    """Public key of the provider's credentials."""
    return read_creds(server.creds).user


async def entries(nexus: Run, *words: str) -> list[dict[str, Any]]:
    return json.loads((await nexus("audit", *words, "--json"))[1])


async def test_who_stops_a_tenants_job_is_named_by_its_key_and_in_words(
    nexus: Run,
    server: EmbeddedServer,
    bus: Bus,
    provider: str,
    tmp_path: Path,
    eventually: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NEXUS_CREDS", str(server.creds))  # what --creds changes is put back
    creds = tmp_path / "acme.creds"
    assert (await nexus("tenant", "add", "acme", "--out", creds))[0] == 0
    tenant = read_creds(creds).user
    for name in ("mine", "theirs"):
        (tmp_path / name).with_suffix(".toml").write_text(DOCUMENT.format(name=name))
        assert (await nexus("submit", tmp_path / f"{name}.toml", "--creds", creds))[0] == 0
    for verb in ("pause", "cancel"):
        for job, file in (("mine", creds), ("theirs", server.creds)):
            assert (await nexus(verb, job, "--creds", file))[0] == 0

    async def ended() -> bool:
        found = await bus.kv("registry").entries(registry.job_key("acme", ""), JobState)
        return all(entry.value.closed for entry in found.values())

    await eventually(ended)
    found = await entries(nexus)
    asked = {(one["action"], one["job"]): one["key"] for one in found if one["outcome"] == "asked"}
    assert asked == {
        ("job.submit", "mine"): tenant,
        ("job.submit", "theirs"): tenant,
        ("job.pause", "mine"): tenant,
        ("job.pause", "theirs"): provider,
        ("job.cancel", "mine"): tenant,
        ("job.cancel", "theirs"): provider,
    }
    said = {(one["action"], one["job"]): one["detail"] for one in found if one["action"] in ("pause", "cancelled")}
    assert said == {
        ("pause", "mine"): "paused by the tenant",
        ("pause", "theirs"): "paused by the provider",
        ("cancelled", "mine"): "cancelled by the tenant",
        ("cancelled", "theirs"): "cancelled by the provider",
    }


async def test_what_an_operator_does_with_a_tenant_is_under_its_key(nexus: Run, provider: str, tmp_path: Path) -> None:
    for words in (
        ("add", "acme", "--label", "laptop", "--out", tmp_path / "one.creds"),
        ("limit", "acme", "jobs=1", "device_s=none"),
        ("rotate", "acme", "--out", tmp_path / "two.creds"),
        ("suspend", "acme", "--reason", "unpaid"),
        ("activate", "acme"),
        ("remove", "acme", "--yes"),
    ):
        assert (await nexus("tenant", *words))[0] == 0
    found = await entries(nexus)
    assert [(one["action"], one["detail"]) for one in found] == [
        ("tenant.add", "laptop"),
        ("tenant.limit", "jobs=1 device_s=none"),
        ("tenant.rotate", ""),
        ("tenant.suspend", "unpaid"),
        ("tenant.activate", ""),
        ("tenant.suspend", "is being removed"),
        ("tenant.remove", ""),
    ]
    assert {one["key"] for one in found} == {provider}


@pytest.mark.parametrize(
    ("subject", "tenant", "job"),
    [("train.record.acme.pick", "acme", "pick"), ("job.cancel.acme", "acme", ""), ("made.by.hand", "provider", "")],
)
async def test_who_decides_about_a_dead_letter_is_on_record(
    nexus: Run, bus: Bus, provider: str, subject: str, tenant: str, job: str
) -> None:
    letter = DeadLetter(
        stream="TRAINING",
        subject=subject,
        msg_id="one",
        reason="always fails",
        deliveries=3,
        time=now(),
        headers={},
        payload=b"",
    )
    await bus.publish("dead", letter, msg_id="dead/one", stream="training", tenant="acme")
    done = ["dead.drop"]
    if subject.startswith("train"):
        done.insert(0, "dead.retry")
        assert (await nexus("dead", "retry", 1))[0] == 0
    assert (await nexus("dead", "drop", 1))[0] == 0
    found = await entries(nexus, "--tenant", tenant)
    detail = f"dead letter 1, {subject}: always fails"
    assert [(one["action"], one["job"], one["detail"], one["key"]) for one in found] == [
        (action, job, detail, provider) for action in done
    ]
    assert (await nexus("dead", "drop", 1))[0] == 2, "what is not there is not dropped"
    assert len(await entries(nexus, "--tenant", tenant)) == len(done)
