"""Every head in every tier it runs in, side by side through the whole line; a kill in the lora tier; weights to leave with."""

import asyncio
import json
from pathlib import Path

import pytest

from nexus_bus.client import Client
from schemas.job import DataSpec, EvaluationSpec, ExpertSpec, HeadSpec, JobSpec, LoraSpec, Ppo, Sft
from tests.line.conftest import Service, ended
from tests.line.test_line import TOUCH, _killed

pytestmark = [pytest.mark.gl, pytest.mark.timeout(300)]

SMALL = LoraSpec(rank=4, learning_rate=1e-3)
SIZES = {"oft": {}, "gr00t": {"width": 32, "layers": 2, "repeats": 2}, "pi": {"width": 32, "heads": 2}, "fast": {"levels": 15}}


def job(name: str, head: str, lora: LoraSpec | None, steps: int = 20) -> JobSpec:
    return JobSpec(
        kind="sft", name=name, head=HeadSpec(type=head, horizon=4, options=SIZES[head]), environment=TOUCH,
        tier="lora" if lora else "frozen", lora=lora, data=DataSpec(expert=ExpertSpec(episodes=3)),
        algorithm=Sft(steps=steps, batch_size=4, publish_every=10), evaluation=EvaluationSpec(episodes=2, before=False), seed=3,
    )  # fmt: skip


async def test_all_heads_and_tiers_learn_and_act_side_by_side(client: Client) -> None:
    rows = [
        ("oft", None),
        ("gr00t", None),
        ("pi", None),
        ("oft", SMALL),
        ("gr00t", LoraSpec(rank=2)),
        ("pi", SMALL),
        ("fast", SMALL),
    ]
    names = [f"tier-{head}-{'lora' if lora else 'frozen'}" for head, lora in rows]
    await asyncio.gather(*(client.submit(job(name, head, lora)) for name, (head, lora) in zip(names, rows, strict=True)))
    for name, (_, lora) in zip(names, rows, strict=True):
        state = await ended(client, name)
        assert state.phase == "completed", (name, state.reason)
        assert "success_after" in state.scores
        versions = await client.policies(name)
        assert [version.n for version in versions] == [0, 1, 2]
        adapters = [version.adapter.sha256 if version.adapter else None for version in versions]
        assert len(set(adapters)) == (3 if lora else 1), "an adapter of its own at every version, or none at all"


async def test_a_killed_trainer_changes_nothing_in_the_lora_tier(client: Client, service: Service, tmp_path: Path) -> None:
    spec = JobSpec(
        kind="rl", name="lora-killed", head=HeadSpec(horizon=4), environment=TOUCH, tier="lora", lora=SMALL,
        algorithm=Ppo(updates=3, episodes_per_update=4, minibatch=16), seed=2,
    )  # fmt: skip
    await client.submit(spec)
    state = await _killed(client, service, "trainer-0", "lora-killed", "training")
    assert state.phase == "completed", state.reason
    calm = JobSpec(**{name: getattr(spec, name) for name in spec.__struct_fields__} | {"name": "lora-calm"})
    await client.submit(calm)
    assert (await ended(client, "lora-calm")).phase == "completed"
    killed, undisturbed = await client.policies("lora-killed"), await client.policies("lora-calm")
    assert [(v.weights.sha256, v.adapter) for v in killed] == [(v.weights.sha256, v.adapter) for v in undisturbed]
    await client.export("lora-calm@latest", tmp_path / "mine")
    assert {"adapter_config.json", "adapter_model.safetensors", "action_head.safetensors", "policy_contract.json"} <= {
        path.name for path in (tmp_path / "mine").iterdir()
    }
    assert json.loads((tmp_path / "mine" / "adapter_config.json").read_text())["r"] == 4
