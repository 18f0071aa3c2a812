"""A protocol through the whole service: several tasks on a real simulator, the same episodes every time, a page with films."""

from pathlib import Path

import pytest

from nexus_bus import __version__
from nexus_bus.client import Client
from nexus_bus.evaluation.files import write
from nexus_bus.evaluation.protocol import eval_job
from schemas.evaluation import EvaluationEpisode, Protocol
from schemas.job import DataSpec, EnvironmentSpec, EvaluationSpec, ExpertSpec, HeadSpec, JobSpec, Sft
from tests.line.conftest import ended

pytestmark = [pytest.mark.gl, pytest.mark.timeout(300)]

PROTOCOL = Protocol(
    environment="tabletop",
    tasks=("touch", "reach"),
    trials=4,
    seed=300,
    max_steps=16,
    execute=2,
    options={"blocks": 1},
    films=2,
)


async def trained(client: Client) -> None:
    """`judged@0` and `judged@1`, with an evaluation before and after."""
    spec = JobSpec(
        kind="sft", name="judged", head=HeadSpec(horizon=4),
        environment=EnvironmentSpec(id="tabletop", task="touch", options={"blocks": 1, "max_steps": 12}),
        data=DataSpec(expert=ExpertSpec(episodes=4)), algorithm=Sft(steps=40, batch_size=8, publish_every=40),
        evaluation=EvaluationSpec(episodes=3),
    )  # fmt: skip
    await client.submit(spec)
    state = await ended(client, "judged")
    assert state.phase == "completed", state.reason


def told(one: EvaluationEpisode) -> tuple[object, ...]:
    """All of an episode that is not time."""
    return one.task, one.trial, one.seed, one.success, one.end, one.episode_return, one.length, one.policy, one.simulator


async def test_a_protocol_gives_the_same_episodes_every_time_and_a_page(client: Client, tmp_path: Path) -> None:
    await trained(client)
    for name, policy in (("judge-a", "judged@1"), ("judge-b", "judged@1"), ("judge-c", "judged@0")):
        await client.submit(eval_job(PROTOCOL, policy, name))
    for name in ("judge-a", "judge-b", "judge-c"):
        state = await ended(client, name)
        assert state.phase == "completed", state.reason
    first, again = [[told(one) for one in await client.episodes(name)] for name in ("judge-a", "judge-b")]
    assert first == again, "grouped with others' requests or not"
    assert len({(one[0], one[1]) for one in first}) == 8
    same = await client.compare("judge-a", "judge-b")
    assert (same.pairs, same.identical, same.difference, same.p_value) == (8, 8, 0.0, 1.0)
    other = await client.compare("judge-c", "judge-a")
    assert (other.pairs, other.unpaired) == (8, 0)
    assert other.tasks.keys() == {"touch", "reach"}

    episodes = await client.episodes("judge-a")
    films = {one.film: film for one in episodes if one.film and (film := await client.film("judge-a", one.film)) is not None}
    assert 2 <= len(films) <= 4
    assert {film.media_type for film in films.values()} == {"video/mp4"}
    assert all("red block" in film.instruction for film in films.values())
    made = await client.report("judge-a")
    version = await client.policy("judged@1")
    (one,) = made.evaluations
    assert one.version is not None
    assert (one.version.weights, one.version.backbone) == (version.weights.sha256, version.contract.backbone)
    assert one.services == [__version__]
    assert min(episode.attempts for episode in episodes) >= 1  # more where a busy machine had an order come again
    assert made.protocol.simulator.startswith("tabletop-1 (mujoco ")
    assert any("deterministic" in note for note in made.notes)
    assert all(one.simulate_s > 0 and one.forward_s > 0 for one in episodes)
    page = next(path for path in write(tmp_path, made, episodes, films) if path.name == "report.html")
    assert page.read_text().count("<video") == len(films)
    assert await Client(client.bus, "globex").episodes("judge-a") == []


async def test_what_a_job_evaluates_before_and_after_is_compared_by_itself(client: Client) -> None:
    if await client.job("judged") is None:
        await trained(client)
    made = await client.report("judged")
    assert [(one.purpose, one.policy, one.overall.episodes) for one in made.evaluations] == [
        ("before", "judged@0", 3),
        ("after", "judged@1", 3),
    ]
    assert made.change is not None
    assert made.change.pairs == 3
    assert (await client.compare("judged")).difference == made.change.difference
