"""Whether a job's dataset is there and fits what the job learns for: said when it is planned, not when it begins.

Datasets lie on the disks of environment workers, so that the service asks one of them. Only what is known to be wrong is
refused: where nobody answers, or not all workers need share a disk, the job finds out when it begins.
"""

import asyncio
import math
from collections.abc import Iterable

from nexus_bus import initial, registry
from nexus_bus.bus import Bus, discover
from nexus_bus.envs.offered import is_own
from nexus_bus.errors import BadJob, NotFound, Refused, Unavailable
from nexus_bus.nearest import nearest
from nexus_bus.offers import offered
from nexus_bus.plan import spaces
from schemas.base import PUBLIC
from schemas.dataset import DatasetInfo, DatasetPage, DatasetQuery
from schemas.job import JobSpec
from schemas.plan import TERMINAL, JobState
from schemas.policy import ActionSpec, ObservationSpec, PolicyVersion

IMAGES, STATE, ACTION = "observation.images.", "observation.state", "action"
ASK_S = 3.0  # that an environment worker may take
HOSTS_S = 0.5


def reads(spec: JobSpec) -> str:
    """The dataset that a job expects to be there; empty if it reads none, or records it first."""
    data = spec.data
    return data.dataset or "" if spec.kind == "sft" and data is not None and data.expert is None else ""


def misfit(found: DatasetInfo, where: str, action: ActionSpec, seen: ObservationSpec) -> str:
    """What a dataset lacks for a policy, beginning with `data.dataset`; empty if nothing, or if it is not known.

    Args:
        where: what the policy is for, in words: an environment's id, or the policy it goes on from.
    """
    has, name = found.features, found.dataset
    if not has:
        return ""
    pictures = {key.removeprefix(IMAGES): tuple(shape) for key, shape in has.items() if key not in (STATE, ACTION)}
    for camera, shape in seen.cameras.items():
        if camera not in pictures:
            there = ", ".join(f"{key} ({_size(shape)})" for key, shape in has.items() if key not in (STATE, ACTION))
            return (
                f"data.dataset: {name!r} has no feature {IMAGES}{camera}, and {where} shows the camera {camera!r} "
                f"({_size(shape)}); its pictures are {there or 'none'}: name cameras alike in both"
            )
        if pictures[camera] != tuple(shape):
            return (
                f"data.dataset: {IMAGES}{camera} of {name!r} is {_size(pictures[camera])}, and {where} shows {_size(shape)}: "
                "make pictures of one size in both"
            )
    for key, size in ((STATE, seen.state_size), (ACTION, action.size)):
        if key not in has:
            return f"data.dataset: {name!r} has no feature {key}; a policy learns from {STATE} and {ACTION}"
        if (numbers := math.prod(has[key])) != size:
            return f"data.dataset: {key} of {name!r} has {numbers} numbers, and {where} has {size}: they must be the same"
    return ""


def absent(dataset: str, others: Iterable[str]) -> str:
    """What is said of a dataset that is not there."""
    first, _, rest = dataset.partition("/")
    if first == PUBLIC and rest:
        return f"data.dataset: the provider has put no {dataset!r} there"
    push = f"bring it first: nexus data push DIR --name {dataset}"
    return f"data.dataset: you have no dataset {dataset!r}{nearest(dataset, others)}; {push}"


def place(spec: JobSpec) -> str:
    """What a job learns for, in words."""
    return spec.environment.id if spec.environment is not None else f"the policy {spec.init}"


async def check(bus: Bus, tenant: str, spec: JobSpec) -> None:
    """Refuse a job whose dataset is known not to be there, or not to fit. The gateway's.

    Raises:
        BadJob: the text begins with `data.dataset`.
    """
    dataset = reads(spec)
    if not dataset or await bus.kv("registry").get(registry.job_key(tenant, spec.name), JobState) is not None:
        return  # one that is there is the same order again, or is refused for its name
    try:
        wrong = await _wrong(bus, tenant, spec, dataset)
    except (Refused, Unavailable):  # nobody knows, or something else is wrong, which is said by whoever plans it
        return
    if wrong:
        raise BadJob(wrong)


async def _wrong(bus: Bus, tenant: str, spec: JobSpec, dataset: str) -> str:
    found = await look(bus, tenant, dataset)
    if found is None:
        return absent(dataset, [one.dataset for one in await _asked(bus, tenant, DatasetQuery())])
    needs = await _needs(bus, tenant, spec)
    return misfit(found, place(spec), *needs) if needs is not None else ""


async def look(bus: Bus, tenant: str, dataset: str) -> DatasetInfo | None:
    """A dataset, as a job names it; None if it is known not to be there. The gateway's.

    Raises:
        NotFound: the name leads out of what the tenant may read.
        Unavailable: it is not known: no worker answers, others may have another disk, or a job is about to record it.
    """
    if found := await _asked(bus, tenant, DatasetQuery(dataset=dataset)):
        return found[0]
    jobs = await bus.kv("registry").entries(registry.job_key(tenant, ""), JobState)
    for state in (entry.value for entry in jobs.values()):
        spec = state.plan.spec
        records = spec.data is not None and spec.data.expert is not None and (spec.data.dataset or spec.name) == dataset
        if records and state.phase not in TERMINAL:
            raise Unavailable(f"data.dataset: the job {spec.name!r} is going to record {dataset!r}")
    hosts = {one.about.get("host") for one in await discover(bus, "environment", HOSTS_S)}
    if len(hosts) > 1:
        raise Unavailable(f"data.dataset: one of {len(hosts)} hosts has no {dataset!r}; whether others have is not known")
    return None


async def _asked(bus: Bus, tenant: str, query: DatasetQuery) -> list[DatasetInfo]:
    page: DatasetPage = await bus.request("data.list", query, timeout=ASK_S, tenant=tenant)
    return page.datasets


async def _needs(bus: Bus, tenant: str, spec: JobSpec) -> tuple[ActionSpec, ObservationSpec] | None:
    kv = bus.kv("registry")
    version: PolicyVersion | None = None
    own = {}
    if spec.environment is None:
        name = await initial.resolved(kv, tenant, spec.init) if spec.init is not None else None
        if name is None:
            return None
        job, _, n = name.partition("@")
        entry = await kv.get(registry.policy_key(tenant, job, int(n)), PolicyVersion)
        if entry is None:
            raise NotFound(f"init: no {name}")
        version = entry.value
    elif is_own(spec.environment.id):
        own = await offered(bus, tenant)
    return await asyncio.to_thread(spaces, spec, version, own)


def _size(shape: Iterable[int]) -> str:
    return "×".join(map(str, list(shape)[:2]))
