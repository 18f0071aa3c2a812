"""The reinforcement learning example as somebody writes it who tunes nothing: it may not end below where it began."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from nexus_bus.client import Client
from nexus_bus.documents import job_spec
from nexus_bus.evaluation.statistics import newcombe
from schemas.evaluation import Comparison
from schemas.job import DataSpec, EvaluationSpec, JobSpec, Ppo
from tests.line.conftest import ended

EXAMPLES = Path(__file__).parents[2] / "ops" / "examples"
SEEDS = (0, 1, 2)
TRIALS = 120  # twice the example's: an interval of one seed is then some 12 points wide on either side
WITHIN_S = 1500.0

pytestmark = [pytest.mark.slow, pytest.mark.gl, pytest.mark.timeout(2 * WITHIN_S)]


def jobs(seed: int) -> tuple[JobSpec, JobSpec]:
    """The example's two documents under names of their own. Of the algorithm, only what it is and how long it runs is said."""
    warm, rl = job_spec(EXAMPLES / "rl-warm.toml"), job_spec(EXAMPLES / "rl.toml")
    assert warm.data is not None
    assert warm.data.expert is not None
    assert isinstance(rl.algorithm, Ppo)
    data = DataSpec(expert=msgspec.structs.replace(warm.data.expert, seed=seed * 1000 + 1))
    warm = msgspec.structs.replace(warm, name=f"untuned-{seed}-warm", data=data, seed=seed)
    rl = msgspec.structs.replace(
        rl, name=f"untuned-{seed}", init=f"{warm.name}@latest", algorithm=Ppo(updates=rl.algorithm.updates),
        evaluation=EvaluationSpec(episodes=TRIALS), seed=seed,
    )  # fmt: skip
    return warm, rl


async def improvement(client: Client, seed: int) -> Comparison:
    """Before against after, trial by trial."""
    for spec in jobs(seed):
        await client.submit(spec)
    state = await ended(client, f"untuned-{seed}", WITHIN_S)
    assert state.phase == "completed", state.reason
    return await client.compare(f"untuned-{seed}")


async def test_the_example_without_tuned_values_improves_and_no_seed_of_it_gets_worse(client: Client) -> None:
    found = await asyncio.gather(*(improvement(client, seed) for seed in SEEDS))
    told = "; ".join(f"{one.success_a:.2f} → {one.success_b:.2f} [{one.low:+.2f}, {one.high:+.2f}]" for one in found)
    assert all(one.pairs == TRIALS for one in found)
    assert all(one.high > 0 for one in found), f"a seed ends below its start: {told}"
    table = [sum(counts) for counts in zip(*((one.both, one.only_a, one.only_b, one.neither) for one in found), strict=True)]
    low, _ = newcombe(*table)
    assert low > 0, f"all seeds together do not end above their start: {told}"
