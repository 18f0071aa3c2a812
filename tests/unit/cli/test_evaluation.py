"""`nexus eval --protocol`, `report` and `compare`, on a real server with a master; episodes are recorded by the test."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nexus_bus.bus import Bus
from nexus_bus.client import Client
from schemas.control import JobReport
from schemas.evaluation import EvaluationEpisode
from schemas.rollout import EpisodeResult
from tests.unit.mastering import keep

Run = Callable[..., Awaitable[tuple[int, str, str]]]
PROTOCOL = """
environment = "tabletop"
tasks = ["touch", "reach"]
trials = 3
seed = 40
max_steps = 30
"""


@pytest.fixture(autouse=True)
async def kept(bus: Bus) -> None:
    """Two versions to evaluate."""
    for n in (0, 1):
        await keep(bus, n)


@pytest.fixture
def protocol(tmp_path: Path) -> Path:
    path = tmp_path / "protocol.toml"
    path.write_text(PROTOCOL)
    return path


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)


async def play(bus: Bus, job: str, policy: str, solved: int, *, simulator: str = "tabletop-1", episodes: int = 6) -> None:
    """Record and report episodes of a job, as a rollout worker does; the first ones are solved."""
    for index in range(episodes):
        trial, number = divmod(index, 2)
        success = index < solved
        given: dict[str, Any] = {
            "job": job, "purpose": "after", "index": index, "policy": policy, "seed": 40 + trial, "success": success,
            "end": "success" if success else "time_limit", "episode_return": float(success), "length": 9,
        }  # fmt: skip
        episode = EvaluationEpisode(
            task=("touch", "reach")[number], trial=trial, simulate_s=0.1, forward_s=0.1, wait_s=0.1, simulator=simulator,
            time="now", **given,
        )  # fmt: skip
        await bus.publish("eval.episode", episode, msg_id=f"{job}/{index}", tenant="acme", job=job)
        report = JobReport(job=job, kind="episode", episode=EpisodeResult(batch=0, environment=simulator, **given))
        await bus.publish("job.report", report, msg_id=f"{job}/{index}/report", tenant="acme", job=job)


async def begun(nexus: Run, protocol: Path, policy: str) -> str:
    code, said, _ = await nexus("eval", "--protocol", protocol, "--policy", policy, "--json")
    assert code == 0
    return json.loads(said)["job"]


async def test_the_same_protocol_and_policy_are_the_same_job_and_a_cancelled_one_goes_on(
    nexus: Run, protocol: Path, bus: Bus
) -> None:
    job = await begun(nexus, protocol, "kept@0")
    assert job.startswith("eval-kept-0-")
    assert await begun(nexus, protocol, "kept@0") == job
    assert await begun(nexus, protocol, "kept@1") != job
    code, said, _ = await nexus("eval", "--protocol", protocol, "--policy", "kept@0")
    assert (code, said) == (0, f"{job}: is evaluating_after, 0 of 6 episodes are there\n")
    assert (await nexus("cancel", job))[0] == 0
    client = Client(bus, "acme")
    await client.wait(job)
    code, said, _ = await nexus("eval", "--protocol", protocol, "--policy", "kept@0")
    assert (code, said) == (0, f"{job}: goes on with evaluating_after, 0 of 6 episodes are there\n")
    await play(bus, job, "kept@0", 4)
    code, said, _ = await nexus("eval", "--protocol", protocol, "--policy", "kept@0", "--wait")
    assert (code, said) == (0, f"{job} completed: success 0.67 [0.30, 0.90]\n")


async def test_a_name_that_another_protocol_has_is_refused_by_its_fields(nexus: Run, protocol: Path) -> None:
    words = ("eval", "--protocol", protocol, "--policy", "kept@0", "--name", "mine")
    assert (await nexus(*words))[0] == 0
    assert (await nexus(*words))[1].startswith("mine: is evaluating_after, 0 of 6")
    rewrite(protocol, PROTOCOL.replace("max_steps = 30", "max_steps = 20\nexecute = 2\n[options]\nblocks = 2"))
    code, _, said = await nexus(*words)
    assert code == 2
    assert "name: a job 'mine' exists, and it is not the one asked for: max_steps: 30 and 20; execute: 4 and 2" in said
    assert "options.blocks: 3 and 2; choose another --name" in said


async def test_a_policy_may_stand_in_the_protocol_and_latest_is_pinned_at_once(nexus: Run, protocol: Path) -> None:
    rewrite(protocol, PROTOCOL + 'policy = "kept@0"\n')
    code, said, _ = await nexus("eval", "--protocol", protocol, "--json")
    assert code == 0
    assert json.loads(said)["job"].startswith("eval-kept-0-")
    assert (await begun(nexus, protocol, "kept@latest")).startswith("eval-kept-1-")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--episodes", "5"], "--protocol says it all"),
        (["--env", "tabletop:touch"], "--protocol says it all"),
    ],
)
async def test_flags_beside_a_protocol_are_refused(nexus: Run, protocol: Path, words: list[str], says: str) -> None:
    code, _, said = await nexus("eval", "--protocol", protocol, "--policy", "kept@0", *words)
    assert code == 2
    assert says in said


async def test_a_protocol_that_cannot_be_had_is_refused_with_its_line(nexus: Run, protocol: Path) -> None:
    code, _, said = await nexus("eval", "--protocol", protocol)
    assert code == 2
    assert "names no policy: give --policy JOB@N" in said
    rewrite(protocol, PROTOCOL + "wait_steps = 10\n")
    code, _, said = await nexus("eval", "--protocol", protocol, "--policy", "kept@0")
    assert code == 2
    assert f"{protocol}:7: wait_steps: 10 cannot be had of tabletop" in said


async def test_a_report_is_a_table_json_or_files(nexus: Run, protocol: Path, bus: Bus, tmp_path: Path) -> None:
    job = await begun(nexus, protocol, "kept@0")
    code, _, said = await nexus("report", job)
    assert code == 2
    assert f"'{job}' is evaluating, and none of 6 episodes has ended yet; `nexus watch {job}`" in said
    await play(bus, job, "kept@0", 3, episodes=4)
    code, table, _ = await nexus("report", job)
    assert code == 0
    lines = [line.split() for line in table.splitlines()]
    assert [line[:4] for line in lines[1:4]] == [
        ["kept@0", "touch", "2/2", "1.000"],
        ["kept@0", "reach", "1/2", "0.500"],
        ["kept@0", "all,", "pooled", "3/4"],
    ]
    assert "4 of 6 episodes are there" in table
    manifest = json.loads((await nexus("report", job, "--json"))[1])
    assert manifest["evaluations"][0]["overall"]["success"] == 0.75
    assert manifest["protocol"]["tasks"] == ["touch", "reach"]
    assert manifest["evaluations"][0]["version"]["weights"] == f"{0:064d}"
    code, said, _ = await nexus("report", job, "--out", tmp_path / "out")
    assert (code, said) == (0, f"{tmp_path}/out/report.html: 4 episodes, 0 films\n")
    assert (tmp_path / "out" / "protocol.toml").is_file()
    assert (await nexus("report", "nothing"))[0] == 2


async def test_two_policies_of_one_protocol_are_compared_and_other_protocols_refused(
    nexus: Run, protocol: Path, bus: Bus
) -> None:
    jobs = [await begun(nexus, protocol, policy) for policy in ("kept@0", "kept@1")]
    await play(bus, jobs[0], "kept@0", 2)
    await play(bus, jobs[1], "kept@1", 5)
    found = json.loads((await nexus("compare", "kept@0", "kept@1", "--json"))[1])
    assert (found["both"], found["only_a"], found["only_b"], found["neither"]) == (2, 0, 3, 1)
    assert found["difference"] == 0.5
    code, table, _ = await nexus("compare", *jobs)
    assert code == 0
    assert "+0.500, 95 % " in table
    rewrite(protocol, PROTOCOL.replace("trials = 3", "trials = 2"))
    shorter = await begun(nexus, protocol, "kept@0")
    await play(bus, shorter, "kept@0", 2, episodes=4)
    code, _, said = await nexus("compare", shorter, jobs[1])
    assert code == 2
    assert "differ in trials: 2 and 3" in said


async def test_another_simulator_is_another_protocol(nexus: Run, protocol: Path, bus: Bus) -> None:
    jobs = [await begun(nexus, protocol, policy) for policy in ("kept@0", "kept@1")]
    await play(bus, jobs[0], "kept@0", 2)
    await play(bus, jobs[1], "kept@1", 5, simulator="tabletop-2")
    code, _, said = await nexus("compare", *jobs)
    assert code == 2
    assert "differ in simulator: 'tabletop-1' and 'tabletop-2'" in said
