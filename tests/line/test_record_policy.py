"""`nexus data record --policy`: a policy of the service plays, and what it saw and did becomes a dataset on this machine."""

import asyncio
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from nexus_bus.client import Client
from nexus_bus.data.check import check
from nexus_bus.data.reader import Dataset
from schemas.job import DataSpec, EnvironmentSpec, EvaluationSpec, ExpertSpec, HeadSpec, JobSpec, Sft
from tests.line.conftest import Service, ended

pytestmark = [pytest.mark.gl, pytest.mark.timeout(300)]

TOUCH = EnvironmentSpec(id="tabletop", task="touch", options={"blocks": 1, "max_steps": 12})
SEED = 7


async def nexus(service: Service, *words: object) -> tuple[int, str, str]:
    """The command line in a process of its own, as acme: exit code, what was printed, what was said about errors."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "nexus_bus.cli", *map(str, words), stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"NEXUS_HOME": str(service.home), "NEXUS_URL": service.url, "NEXUS_TENANT": "acme"},
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_a_policy_records_what_it_does_and_twice_the_same(client: Client, service: Service, tmp_path: Path) -> None:
    spec = JobSpec(
        kind="sft", name="taped", head=HeadSpec(horizon=4), environment=TOUCH, data=DataSpec(expert=ExpertSpec(episodes=4)),
        algorithm=Sft(steps=20, batch_size=8, publish_every=20), seed=1,
    )  # fmt: skip
    await client.submit(spec)
    assert (await ended(client, "taped")).phase == "completed"

    how = ("--policy", "taped@1", "--env", "tabletop", "--task", "touch", "--episodes", 3, "--seed", SEED, "--keep", "all",
           "-o", "blocks=1", "-o", "max_steps=12")  # fmt: skip
    code, out, err = await nexus(service, "data", "record", *how, "--json", tmp_path / "one")
    assert code == 0, err
    info = json.loads(out)
    assert (info["episodes"], info["attempts"]) == (3, 3)
    code, out, err = await nexus(service, "data", "record", *how, tmp_path / "two")
    assert code == 0, err
    assert out.startswith(f"{tmp_path / 'two'}: 3 episodes, {info['frames']} frames, ")
    assert check(tmp_path / "one").errors == 0
    one, two = Dataset(tmp_path / "one"), Dataset(tmp_path / "two")
    for index in range(len(one)):
        first, second = one.frame(index), two.frame(index)
        assert (first.action.tobytes(), first.state.tobytes()) == (second.action.tobytes(), second.state.tobytes())
        np.testing.assert_array_equal(first.images["front"], second.images["front"])
    assert {one.frame(episode.begin).instruction for episode in one.episodes} == {"touch the red block"}

    # The first episode is the one that an evaluation plays under this seed.
    await client.evaluate("taped@1", TOUCH, evaluation=EvaluationSpec(episodes=1, seed=SEED), name="taped-score")
    await ended(client, "taped-score")
    (judged,) = await client.episodes("taped-score")
    first = one.episodes[0]
    successes = np.concatenate([columns["next.success"] for _, columns in one.numbers(["next.success"])])
    assert (first.end - first.begin, bool(successes[: first.end].any())) == (judged.length, judged.success)


async def test_a_policy_that_does_not_fit_is_a_wrong_request_and_leaves_nothing(service: Service, tmp_path: Path) -> None:
    for policy, text in (("nobody@0", "acme has no 'nobody@0'"), ("nobody", "is not of the form <job>@<n>")):
        words = ("data", "record", "--policy", policy, "--env", "tabletop", "--task", "touch", tmp_path / "set")
        code, out, err = await nexus(service, *words)
        assert (code, out) == (2, "")
        assert text in err
    assert not (tmp_path / "set").exists()
