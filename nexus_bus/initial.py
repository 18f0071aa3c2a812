"""What a job's `init` names: a version that exists, or one that another job of the tenant has still to make. The master's."""

from typing import TYPE_CHECKING

from nexus_bus import registry
from nexus_bus.bus import Kv
from nexus_bus.errors import NotFound
from schemas.job import JobSpec
from schemas.plan import TERMINAL, JobState
from schemas.policy import PolicyVersion

if TYPE_CHECKING:
    from nexus_bus.policies import Policies


async def named(kv: Kv, policies: "Policies", tenant: str, spec: JobSpec) -> PolicyVersion | JobSpec | None:
    """What `init` names: a version that exists, or the spec of a job that has still to make it. Raises NotFound."""
    if spec.init is None:
        return None
    job, _, n = spec.init.partition("@")
    parent = await kv.get(registry.job_key(tenant, job), JobState)
    if parent is None:
        return await policies.living(tenant, f"{job}@{0 if n == 'latest' else n}")  # imported, or not there
    if n != "latest" and parent.value.version >= int(n):
        return await policies.living(tenant, spec.init)
    if parent.value.version >= 0:
        found = await kv.get(registry.policy_key(tenant, job, parent.value.version), PolicyVersion)
        if n == "latest" and found is not None:
            return found.value
    if parent.value.phase in TERMINAL:
        newest = parent.value.version
        raise NotFound(f"init: job {job!r} is {parent.value.phase} and has no version {n}; its newest is {newest}")
    return parent.value.plan.spec


async def resolved(kv: Kv, tenant: str, init: str) -> str | None:
    """The version `init` stands for, or None while the job that makes it still runs. Raises NotFound."""
    job, _, n = init.partition("@")
    parent = await kv.get(registry.job_key(tenant, job), JobState)
    if parent is None:
        return f"{job}@{0 if n == 'latest' else n}"
    state = parent.value
    if n != "latest":
        if state.version >= int(n):
            return init
        if state.phase in TERMINAL:
            raise NotFound(f"init: job {job!r} ended as {state.phase} with {state.version} as its newest version, not {n}")
        return None
    if state.phase not in TERMINAL:
        return None
    if state.version < 0:
        raise NotFound(f"init: job {job!r} ended as {state.phase} and published no version")
    return f"{job}@{state.version}"
