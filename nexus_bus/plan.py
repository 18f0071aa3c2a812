"""The compiler: a job document becomes a plan, or a refusal that names the field. Pure, and without torch.

The master runs it when a job comes, `nexus plan` before one is sent.
"""

from dataclasses import dataclass
from pathlib import PurePosixPath

import msgspec

from nexus_bus.envs.catalog import NO_OWN, EnvDescription, Own, describe, options_of
from nexus_bus.envs.offered import is_own
from nexus_bus.errors import BadJob
from nexus_bus.evaluation.protocol import check_evaluation, default_of, described
from nexus_bus.models.bases import SHIPPED, BackboneInfo, check_backbone, check_targets, describe_backbone, require_weights
from nexus_bus.models.catalog import HEADS, check_head, check_size, head_entry, head_layers, suffix_tokens
from schemas.base import PUBLIC
from schemas.job import EvaluationSpec, HeadSpec, JobSpec, LoraSpec, Ppo, Sft
from schemas.plan import Phase, Plan
from schemas.policy import ActionSpec, ObservationSpec, PolicyVersion
from schemas.subjects import subject

MAX_EPISODES = 10_000  # orders of one job on the queue; the stream takes 20,000 on a subject
MAX_DRAWS = 4096  # samples times noise draws of one step: more would not fit beside other tenants
MAX_TOLD = 100  # sentences of a plan, as examples of what a policy is told
MAX_DATASET = 200  # characters of a dataset's directory

# Rough costs on one CPU core at nano size, for the estimate alone.
FORWARD_S, SFT_STEP_S, PPO_CHUNK_S = 0.004, 0.03, 0.0006
ADAPTED_S = 0.009  # of a sample through an adapter, forward and backward, in every step anew


@dataclass(frozen=True)
class _Parts:
    """What a plan is made of, once checked."""

    spec: JobSpec
    head: HeadSpec
    environment: EnvDescription | None
    action: ActionSpec
    observation: ObservationSpec


def compile_plan(
    spec: JobSpec,
    tenant: str,
    init: PolicyVersion | JobSpec | None = None,
    resident: str | None = None,
    own: Own = NO_OWN,
) -> Plan:
    """Check a job and decide how it runs.

    Args:
        init: what `spec.init` names: a version that exists, or the spec of the job that will make it; None when offline.
        resident: the base that the service holds; None when offline.
        own: environments that workers of the tenant's own serve.

    Raises:
        BadJob, NotFound: the job asks for something that does not exist or does not fit; the text begins with the field.
    """
    _check_kind(spec)
    _check_limits(spec)
    spec, backbone = _based(spec, resident)
    _check_base(spec, backbone, init)
    if spec.kind != "eval" and spec.tier not in backbone.tiers:
        raise BadJob(f"tier: {spec.tier!r} is not for {backbone.name!r}, which serves {', '.join(backbone.tiers)}")
    head, lora = _head(spec, init), _lora(spec, backbone, init)
    if spec.environment is not None and is_own(spec.environment.id):
        options = options_of(spec.environment, own)
        spec = msgspec.structs.replace(spec, environment=msgspec.structs.replace(spec.environment, options=options))
    environment = describe(spec.environment, own) if spec.environment is not None else None
    tasks = described(spec.environment, spec.evaluation, own) if spec.environment is not None else []
    _check_environment(spec, environment, head, backbone)
    action, observation = _spaces(spec, environment, init, own)
    _check_memory(spec, head)
    check_backbone(
        backbone,
        tier="frozen" if spec.kind == "eval" else spec.tier,
        layers=head_layers(head, backbone.layers),
        cameras=len(observation.cameras),
        suffix=suffix_tokens(head, action.size),
    )
    check_size(head, backbone.hidden, backbone.layers)
    notes = _notes(spec, init)
    spec = msgspec.structs.replace(spec, head=head, lora=lora, algorithm=_algorithm(spec), evaluation=_evaluation(spec))
    if spec.environment is not None and spec.evaluation is not None:
        check_evaluation(spec.environment, spec.evaluation)
    parts = _Parts(spec, head, environment, action, observation)
    execute = (spec.environment.execute if spec.environment else None) or head.horizon
    phases = _phases(spec)
    batches = _batches(spec)
    return Plan(
        tenant=tenant,
        spec=spec,
        phases=phases,
        roles=_roles(phases, spec),
        subjects=_subjects(tenant, spec, phases),
        action=action,
        observation=observation,
        max_steps=max((one.max_steps for one in tasks), default=1),
        execute=execute,
        latency_ms=spec.latency_ms,
        instructions=list(dict.fromkeys(text for one in tasks for text in one.instructions))[:MAX_TOLD],
        batches=batches,
        varies=environment.varies if environment else "",
        estimates=_estimates(parts, execute, batches),
        notes=notes,
    )


def spaces(spec: JobSpec, init: PolicyVersion | None, own: Own = NO_OWN) -> tuple[ActionSpec, ObservationSpec]:
    """What the policy of a job does and sees. Raises as `compile_plan`."""
    return _spaces(spec, describe(spec.environment, own) if spec.environment is not None else None, init, own)


def names_own(spec: JobSpec, init: PolicyVersion | JobSpec | None) -> bool:
    """Whether a job, or the one it begins from, plays in an environment of its tenant's own."""
    specs = [one for one in (spec, init) if isinstance(one, JobSpec)]
    return any(one.environment is not None and is_own(one.environment.id) for one in specs)


def _based(spec: JobSpec, resident: str | None) -> tuple[JobSpec, BackboneInfo]:
    """With the base that it takes. A service compares a tenant's word for one and never looks it up: it may be any path."""
    base = resident or spec.base or next(iter(SHIPPED))
    backbone = describe_backbone(base)
    require_weights(backbone)
    if spec.base in ("", base, backbone.name):
        return msgspec.structs.replace(spec, base=base), backbone
    if spec.base not in SHIPPED or describe_backbone(spec.base).fingerprint != backbone.fingerprint:
        raise BadJob(f"base: the job asks for {spec.base[:80]!r}, this service holds {base!r}; leave `base` out to take that")
    return msgspec.structs.replace(spec, base=base), backbone


def _check_kind(spec: JobSpec) -> None:
    if spec.lora is not None and spec.tier != "lora":
        raise BadJob('lora: needs tier = "lora"')
    if spec.kind == "eval":
        if spec.init is None:
            raise BadJob('init: an eval job names the policy version it evaluates, e.g. init = "pick@3"')
        if spec.algorithm is not None or spec.data is not None:
            raise BadJob("algorithm: an eval job learns nothing; leave out algorithm and data")
        if spec.lora is not None:
            raise BadJob("lora: an eval job takes the adapter that its policy has; leave `lora` out")
    elif spec.kind == "sft":
        if isinstance(spec.algorithm, Ppo):
            raise BadJob("algorithm: 'ppo' needs kind = \"rl\"")
        if spec.data is None or (spec.data.dataset is None and spec.data.expert is None):
            raise BadJob("data: an sft job needs data.dataset (a directory of yours) or data.expert (to record one)")
    else:
        if isinstance(spec.algorithm, Sft):
            raise BadJob("algorithm: 'sft' needs kind = \"sft\"")
        if spec.data is not None:
            raise BadJob("data: an rl job learns from its own episodes; start from a policy trained on data by `init`")
    if spec.environment is None and (spec.kind != "sft" or spec.evaluation is not None or (spec.data and spec.data.expert)):
        raise BadJob(f"environment: {spec.kind} with what it asks for needs one; `nexus catalog` lists them")


def _check_limits(spec: JobSpec) -> None:
    if spec.budget.device_s is not None and spec.budget.device_s <= 0:
        raise BadJob(f"budget.device_s: {spec.budget.device_s:g} s leave no time to run")
    if spec.budget.wall_s is not None and spec.budget.wall_s < 1:
        raise BadJob(f"budget.wall_s: {spec.budget.wall_s:g} s leave no time to run")
    for field, asked in (
        ("evaluation.episodes", spec.evaluation.total if spec.evaluation else 0),
        ("data.expert.episodes", spec.data.expert.episodes if spec.data and spec.data.expert else 0),
        ("algorithm.episodes_per_update times (staleness + 1)", _ahead(spec)),
    ):
        if asked > MAX_EPISODES:
            raise BadJob(f"{field}: {asked}; at most {MAX_EPISODES} episodes are handed out at once")
    dataset = (spec.data.dataset if spec.data else None) or "_"
    path = PurePosixPath(dataset)
    if path.is_absolute() or ".." in path.parts or not path.parts or not dataset.isprintable() or len(dataset) > MAX_DATASET:
        raise BadJob(f"data.dataset: {dataset[:MAX_DATASET]!r} is not a directory below your data root")
    if spec.data is not None and spec.data.expert is not None and len(path.parts) > 1 and path.parts[0] == PUBLIC:
        raise BadJob(f"data.dataset: {dataset!r} is read by every tenant and recorded by none; name a directory of your own")
    if isinstance(spec.algorithm, Sft) and spec.algorithm.warmup_steps > spec.algorithm.steps:
        raise BadJob(f"algorithm.warmup_steps: {spec.algorithm.warmup_steps} of {spec.algorithm.steps} steps")


def _check_memory(spec: JobSpec, head: HeadSpec) -> None:
    """What a step keeps for its backward grows with its samples and their noise draws."""
    samples = spec.algorithm.batch_size if isinstance(spec.algorithm, Sft) else 0
    repeats = int(head.options.get("repeats", 1))
    if samples * repeats > MAX_DRAWS:
        raise BadJob(
            f"algorithm.batch_size: {samples} samples of {repeats} noise draws make {samples * repeats} in a step; "
            f"at most {MAX_DRAWS}: take fewer samples, or a smaller head.options.repeats"
        )


def _ahead(spec: JobSpec) -> int:
    """Training episodes that may be on the queue together."""
    return spec.algorithm.episodes_per_update * (spec.algorithm.staleness + 1) if isinstance(spec.algorithm, Ppo) else 0


def _check_base(spec: JobSpec, backbone: BackboneInfo, init: PolicyVersion | JobSpec | None) -> None:
    if isinstance(init, JobSpec) and init.base not in ("", spec.base):
        raise BadJob(f"base: {spec.init} is trained on {init.base!r}, this job asks for {spec.base!r}")
    if isinstance(init, PolicyVersion) and init.contract.backbone_fingerprint != backbone.fingerprint:
        raise BadJob(f"base: {spec.init} was trained on {init.contract.backbone!r}, not on what {spec.base!r} is now")


def _head(spec: JobSpec, init: PolicyVersion | JobSpec | None) -> HeadSpec:
    inherited = init.contract.head if isinstance(init, PolicyVersion) else init.head if init is not None else None
    if spec.head is None:
        return check_head(inherited or HeadSpec())
    head = check_head(spec.head)
    if inherited is not None and head != check_head(inherited):
        raise BadJob(
            f"head: {spec.init} has the head {inherited.type} with horizon {inherited.horizon}; leave `head` out to inherit it"
        )
    return head


def _lora(spec: JobSpec, backbone: BackboneInfo, init: PolicyVersion | JobSpec | None) -> LoraSpec | None:
    """The adapter a job trains: what `lora` says, else what it inherits, else the defaults."""
    inherited = init.contract.lora if isinstance(init, PolicyVersion) else init.lora if init is not None else None
    if isinstance(init, JobSpec) and init.tier == "lora" and inherited is None:
        inherited = LoraSpec()
    if spec.tier != "lora" or spec.kind == "eval":
        if inherited is not None and spec.kind != "eval":
            raise BadJob(f'tier: {spec.init} has an adapter, and its head was trained with it; use tier = "lora"')
        return None
    lora = spec.lora or inherited or LoraSpec()
    if inherited is not None and msgspec.structs.replace(lora, learning_rate=inherited.learning_rate) != inherited:
        has = f"rank {inherited.rank}, alpha {inherited.alpha:g}, targets {', '.join(inherited.targets)}"
        raise BadJob(f"lora: {spec.init} has another adapter ({has}); leave `lora` out to inherit it")
    if lora.last_layers > backbone.layers:
        raise BadJob(f"lora.last_layers: {lora.last_layers}, but {backbone.name} has {backbone.layers}")
    check_targets(backbone, lora.targets)
    return lora


def _check_environment(spec: JobSpec, environment: EnvDescription | None, head: HeadSpec, backbone: BackboneInfo) -> None:
    entry = head_entry(head.type)
    if entry.queries and head.horizon > backbone.query_tokens:
        raise BadJob(f"head.horizon: {head.horizon}, but {backbone.name} takes at most {backbone.query_tokens}")
    execute = spec.environment.execute if spec.environment else None
    if execute is not None and execute > head.horizon:
        raise BadJob(f"environment.execute: {execute} actions of a chunk of {head.horizon}")
    if spec.kind == "rl" and not entry.rl:
        able = ", ".join(name for name, entry in HEADS.items() if entry.rl)
        raise BadJob(f"head.type: {head.type!r} has no log-prob for reinforcement learning; use {able}")
    if spec.kind != "eval" and spec.tier not in entry.tiers:
        raise BadJob(f"tier: {head.type!r} needs {' or '.join(entry.tiers)}")
    if spec.data is not None and spec.data.expert is not None and environment is not None and not environment.expert:
        raise BadJob(
            f"data.expert: {spec.environment.id if spec.environment else ''} has no scripted expert; give data.dataset"
        )


def _spaces(
    spec: JobSpec, environment: EnvDescription | None, init: PolicyVersion | JobSpec | None, own: Own
) -> tuple[ActionSpec, ObservationSpec]:
    if environment is None:
        if isinstance(init, PolicyVersion):
            return init.contract.action, init.contract.observation
        raise BadJob("environment: needed to know what the policy sees and does; name the one the dataset was recorded in")
    action, observation = environment.action, environment.observation
    if isinstance(init, PolicyVersion):
        had_action, had_seen = init.contract.action, init.contract.observation
    elif init is not None and init.environment is not None:
        known = describe(init.environment, own)
        had_action, had_seen = known.action, known.observation
    else:
        return action, observation
    for field, has, met in (
        ("action.size", had_action.size, action.size),
        ("action bounds", (had_action.low, had_action.high), (action.low, action.high)),
        ("action.gripper", had_action.gripper, action.gripper),
        ("action.rotation", had_action.rotation, action.rotation),
        ("action.control", had_action.control, action.control),
        ("observation.state_size", had_seen.state_size, observation.state_size),
        ("observation.cameras", dict(had_seen.cameras), dict(observation.cameras)),
        ("observation.orientation", had_seen.orientation, observation.orientation),
    ):
        if has != met:
            raise BadJob(f"init: {spec.init} was trained with {field} {has}, this environment has {met}")
    return action, observation


def _algorithm(spec: JobSpec) -> Sft | Ppo | None:
    if spec.algorithm is not None or spec.kind == "eval":
        return spec.algorithm
    return Sft() if spec.kind == "sft" else Ppo()


def _evaluation(spec: JobSpec) -> EvaluationSpec | None:
    if spec.kind == "eval" and spec.evaluation is None:
        return default_of(spec.environment)
    return spec.evaluation


def _phases(spec: JobSpec) -> list[Phase]:
    if spec.kind == "eval":
        return ["waiting", "evaluating_after", "completed"]
    phases: list[Phase] = ["waiting"]
    if spec.kind == "sft":
        phases.append("data")
    phases.append("preparing")
    evaluation = spec.evaluation
    if evaluation is not None and evaluation.before:
        phases.append("evaluating_before")
    phases.append("training")
    if evaluation is not None and evaluation.after:
        phases.append("evaluating_after")
    return [*phases, "completed"]


def _batches(spec: JobSpec) -> int:
    match spec.algorithm:
        case Sft(steps=steps):
            return steps
        case Ppo(updates=updates):
            return updates
        case _:
            return 0


def _roles(phases: list[Phase], spec: JobSpec) -> list[str]:
    roles = ["master", "health"]
    if spec.kind != "eval":
        roles.append("trainer")
    if any(phase.startswith("evaluating") for phase in phases) or spec.kind == "rl":
        roles += ["rollout", "inference"]
    if "data" in phases or "rollout" in roles:
        roles.append("environment")
    return sorted(roles)


def _subjects(tenant: str, spec: JobSpec, phases: list[Phase]) -> dict[str, str]:
    job = spec.name
    found = {"events": subject("event", tenant=tenant, job=job), "cancel": subject("job.cancel", tenant=tenant)}
    if "data" in phases:
        found["sft batches"] = subject("train.batch", tenant=tenant, job=job)
    if spec.kind == "rl":
        found["rollout records"] = subject("train.record", tenant=tenant, job=job)
    if spec.kind == "rl" or any(phase.startswith("evaluating") for phase in phases):
        own = spec.environment if spec.environment is not None and is_own(spec.environment.id) else None
        where = {"tenant": tenant, "job": job, **({"environment": own.id} if own else {})}
        found["rollout orders"] = subject("rollout.own" if own else "rollout.run", **where)
        found["inference"] = subject("infer.request", tenant=tenant)
    return found


def _estimates(parts: _Parts, execute: int, batches: int) -> dict[str, float]:
    spec, environment = parts.spec, parts.environment
    limit = environment.max_steps if environment else 0
    episodes = 0
    if spec.evaluation is not None:
        episodes += spec.evaluation.total * (int(spec.evaluation.before and spec.kind != "eval") + int(spec.evaluation.after))
    steps = episodes * limit
    if spec.data is not None and spec.data.expert is not None:
        steps += spec.data.expert.episodes * limit
    learning = 0.0
    records = 0
    match spec.algorithm:
        case Ppo() as ppo:
            records = batches * ppo.episodes_per_update
            episodes += records
            steps += records * limit
            chunks = records * (limit / execute)
            learning = chunks * ppo.epochs * (PPO_CHUNK_S + (ADAPTED_S if spec.tier == "lora" else 0.0))
        case Sft() as sft:
            records = batches
            learning = batches * (SFT_STEP_S + (sft.batch_size * ADAPTED_S if spec.tier == "lora" else 0.0))
        case None:
            pass
    requests = episodes * limit / execute
    return {
        "episodes": episodes,
        "environment_steps": steps,  # at most: episodes may end before their limit
        "inference_requests": round(requests),
        "records": records,
        "device_s": round(requests * FORWARD_S + learning, 1),
    }


def _notes(spec: JobSpec, init: PolicyVersion | JobSpec | None) -> list[str]:
    notes: list[str] = []
    if spec.kind == "rl" and spec.init is None:
        notes.append("starts from random weights: with a sparse reward it may never see a success; consider `init`")
    if spec.init is not None and isinstance(init, JobSpec):
        notes.append(f"waits for job {init.name!r} to end")
    if spec.init is not None and init is None and spec.head is None:
        notes.append(f"head and horizon are those of {spec.init}, which is not known here; the defaults stand in for them")
    evaluation, environment = spec.evaluation, spec.environment
    if (
        spec.init is None
        and evaluation is not None
        and evaluation.before
        and environment is not None
        and is_own(environment.id)
    ):
        first = f"evaluates an untrained policy first, {evaluation.total} episodes in {environment.id}"
        notes.append(f"{first}; evaluation.before = false leaves them out")
    if spec.evaluation is None and spec.kind != "eval":
        notes.append("no evaluation: add an [evaluation] table to get success rates with intervals")
    return notes
