"""The Training Queue besides rollout records: SFT batches. Environment (dataset side) → trainer."""

from schemas.base import Count, Message, Name, Tensor
from schemas.environment import Observation


class TrainingSample(Message, frozen=True, kw_only=True):
    """One supervised sample: an observation, and the chunk of raw actions that follows it."""

    observation: Observation
    actions: Tensor  # float32 [T, D]
    action_is_pad: Tensor  # bool [T]: past the end of the episode


class TrainingBatch(Message, frozen=True, kw_only=True):
    """SFT batch number `batch` of a job. Drawn from the seed, so the same number always holds the same samples."""

    id: str  # <job>/<batch>
    tenant: Name
    job: Name
    batch: Count
    public: bool = False  # of a dataset that every tenant may read; said by the environment worker alone
    samples: list[TrainingSample]
