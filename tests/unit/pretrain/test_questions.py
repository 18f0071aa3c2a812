"""How the pretraining says numbers, and that several sentences behind one picture do not see each other."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
import torch

from nexus_bus.envs.rendering import probe
from ops.pretrain.checkpoint import build_config, build_image_processor, build_model
from ops.pretrain.tokenizer import build_tokenizer
from ops.pretrain.vocabulary import BY_NAME, GROUPS, LOCATION_TOKENS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("name", [group.name for group in GROUPS if group.name not in ("act", "step")])
def test_a_number_survives_its_group(name: str) -> None:
    group = BY_NAME[name]
    middle = group.decode(np.arange(group.bins))
    assert np.allclose(group.encode(middle), np.arange(group.bins))
    assert np.all(np.diff(middle) > 0)
    assert group.low <= middle[0] < middle[-1] <= group.high


def test_offsets_are_finest_near_zero() -> None:
    width = np.diff(BY_NAME["dx"].decode(np.arange(48)))
    assert width[23] < 0.01 < width[0]


def test_every_location_token_is_one_token_and_shown_when_decoded() -> None:
    tokenizer = build_tokenizer()
    text = "".join(LOCATION_TOKENS)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(LOCATION_TOKENS) == len(set(ids))
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == text


@pytest.mark.gl
def test_a_branch_is_what_it_would_be_as_a_prompt_of_its_own() -> None:
    assert probe().backend is not None
    from ops.pretrain.objective import Objective
    from ops.pretrain.pool import Pool, paint_many
    from ops.pretrain.questions import Questioner

    tokenizer = build_tokenizer()
    model: Any = build_model(build_config(tokenizer), seed=0).eval()
    images, scenes = paint_many((3,), 2, None)
    questioner = Questioner(tokenizer, branches=3)
    batch = questioner.batch(Pool([images], scenes), np.arange(2), np.random.default_rng(0), questions=0.0)
    objective = Objective(tokenizer, questioner, model.config.text_config.hidden_size)
    with torch.no_grad():
        together = objective.hidden(model, batch)[0]
        start, first = len(questioner.prefix), batch.positions[0, 0, len(questioner.prefix)]
        begins = [at for at in range(start, batch.ids.shape[1]) if batch.positions[0, 1, at] == first]
        begin, end = begins[1], int(batch.query_at[4, -1]) - batch.ids.shape[1] + 1  # second branch of the second picture
        ids = torch.cat([batch.ids[1, :start], batch.ids[1, begin:end]])[None]
        seen = build_image_processor()(images[1], return_tensors="pt")
        kinds = (ids == model.config.image_token_id).int()
        alone = model.model(input_ids=ids, mm_token_type_ids=kinds, **seen).last_hidden_state[0]
    assert torch.allclose(alone[-8:], together[batch.query_at[4]], atol=1e-4)
