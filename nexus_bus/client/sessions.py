"""Environment sessions that a tenant's program steps itself: simulators of the service, or the tenant's own ones and robots.

async with client.session(EnvironmentSpec(id="tabletop", task="touch")) as session:
    reply = await session.reset(seed=3)
    while reply.end == "running":
        reply = await session.step(decide(observed(reply)))
"""

import operator
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from nexus_bus.client.calls import Calls
from nexus_bus.client.policies import PolicyCalls
from nexus_bus.errors import BadMessage, EnvironmentFault, NexusError
from schemas.environment import (
    EnvironmentFound,
    EnvironmentQuery,
    Observation,
    SessionAsk,
    SessionCall,
    SessionLease,
    SessionReply,
    SessionStep,
)
from schemas.inference import InferenceReply, InferenceRequest
from schemas.job import EnvironmentSpec
from schemas.policy import ActionSpec, ObservationSpec

if TYPE_CHECKING:
    import numpy as np

    from nexus_bus.envs.simulator import Observed

LEASE_S = 60.0
ANSWERED_S = 70.0  # the gateway itself waits 60 s for a simulator
ACT_S = 60.0
MOST = 2**53  # of a seed: what every language's numbers hold


class Session:
    """One simulator, held for one episode at a time; one call at a time. Made by `Client.session`.

    Every call goes out once: when its answer is lost, nobody knows whether a step was made, and `Unavailable` says so.

    Raises (each call):
        ContractError, BadMessage: what was sent does not fit; nothing was done.
        NotFound: the session is over: its lease ran out, or its worker is gone.
        EnvironmentFault: the simulator failed, and the session with it; open another and play again from the seed.
        Unavailable: no answer.
    """

    def __init__(self, client: Calls, lease: SessionLease) -> None:
        """Use `Client.session`."""
        self._client = client
        self._closed = False
        self.id = lease.session
        self.worker = lease.worker
        self.found = lease.environment  # what a policy must fit here

    async def reset(self, seed: int, trial: int = 0) -> SessionReply:
        """Begin the episode that (seed, trial) names: the same pair is the same one, unless `found.varies` says why not."""
        return await self._call(SessionCall(op="reset", seed=_whole("seed", seed), trial=_whole("trial", trial)))

    async def step(self, actions: "np.ndarray") -> SessionReply:
        """Execute a chunk, float32 `[n, D]`, up to the end of the episode; what is seen is the moment after it."""
        import numpy as np

        from nexus_bus.tensors import to_tensor

        return await self._call(SessionCall(op="step", actions=to_tensor(np.asarray(actions, np.float32))))

    async def render(self) -> "np.ndarray":
        """The first camera's picture of this moment, HWC uint8."""
        from nexus_bus.tensors import decode_image

        image = (await self._call(SessionCall(op="render"))).image
        if image is None:
            raise EnvironmentFault("render: the environment answered without a picture")
        return decode_image(image)

    async def save(self) -> bytes:
        """The whole episode, for `restore` here or in another session of this task. Also NotFound: this simulator cannot."""
        return (await self._call(SessionCall(op="save"))).state

    async def restore(self, state: bytes) -> SessionReply:
        """Go on with a saved episode. Also NotFound: this simulator cannot."""
        return await self._call(SessionCall(op="restore", state=state))

    async def close(self) -> None:
        """Give the simulator back. No error if that fails: the lease ends it."""
        if not self._closed:
            self._closed = True
            with suppress(NexusError):
                await self._call(SessionCall(op="close"))

    async def _call(self, call: SessionCall) -> SessionReply:
        message = SessionStep(session=self.id, call=call)
        return await self._client.bus.request("api.env.call", message, timeout=ANSWERED_S, tenant=self._client.tenant)


class SessionCalls(PolicyCalls):
    """Everything a tenant does with environments, and with policies that act in them."""

    async def environment(self, spec: EnvironmentSpec) -> EnvironmentFound:
        """What a policy must fit there. Raises NotFound, BadJob: no such environment, task or option."""
        return await self.call("env.describe", EnvironmentQuery(environment=spec))

    @asynccontextmanager
    async def session(
        self,
        spec: EnvironmentSpec,
        *,
        lease_s: float = LEASE_S,
        action: ActionSpec | None = None,
        observation: ObservationSpec | None = None,
    ) -> AsyncIterator[Session]:
        """Hold a simulator, and give it back at the end.

        Args:
            lease_s: the session ends itself after this many seconds without a call, at most 3600. Nothing renews it in between:
                a program that thinks for long between steps asks for long enough, and holds one of its tenant's places so long.
            action, observation: what will be sent and is expected, of a policy's contract for instance.

        Raises:
            NotFound, BadJob: no such environment, task or option.
            ContractError: it does not fit `action` or `observation`; the text begins with the field.
            Unavailable: no worker, no place, or no answer; an answer that was lost leaves a session to its lease.
        """
        ask = SessionAsk(environment=spec, lease_s=lease_s, action=action, observation=observation)
        # Once: asked again after an answer was lost, it would hold a second simulator.
        lease = await self.bus.request("api.env.open", ask, timeout=ANSWERED_S, tenant=self.tenant)
        session = Session(self, lease)
        try:
            yield session
        finally:
            await session.close()

    async def act(
        self, policy: str, observation: Observation, *, greedy: bool = True, seed: int = 0, timeout: float = ACT_S
    ) -> InferenceReply:
        """Ask a policy version (`<job>@<n>` or `<job>@latest`) what to do; `chunk` of the answer is its actions.

        Args:
            policy: `@latest` is looked up each time; to play an episode by one version, take its name first:
                `(await client.policy("<job>@latest")).id`. The answer's `policy` says which one it was.
            observation: of a session's reply.
            greedy: False samples, with `seed`.

        Raises:
            NotFound: there is no such version, or it was retired.
            ContractError, BadMessage: the observation does not fit it.
            Unavailable: no answer in time.
        """
        if not policy.rpartition("@")[2].isdecimal():
            policy = (await self.policy(policy)).id
        request = InferenceRequest(
            id=f"{policy}/{seed}",
            job=policy.partition("@")[0],
            policy=policy,
            observation=observation,
            greedy=greedy,
            seed=seed,
        )
        return await self.call("infer.request", request, timeout=timeout)


def _whole(field: str, value: object) -> int:
    try:
        found = operator.index(value)  # type: ignore[arg-type]  # NumPy's whole numbers, too
    except TypeError:
        found = -1
    if not 0 <= found <= MOST:
        raise BadMessage(f"{field}: {str(value)[:40]}; expected a whole number, 0 to 2^53")
    return found


def observed(reply: SessionReply) -> "Observed":
    """What is seen in a reply to reset, step or restore: HWC uint8 `images` by camera, float32 `state`, and the `instruction`.

    Raises BadMessage for a reply without an observation.
    """
    from nexus_bus.envs.simulator import Observed
    from nexus_bus.tensors import decode_image, from_tensor

    seen = reply.observation
    if seen is None:
        raise BadMessage("observation: none in this reply; those to reset, step and restore have one")
    images = {camera: decode_image(image) for camera, image in seen.images.items()}
    return Observed(images, from_tensor(seen.state), seen.instruction)


def chunk(reply: InferenceReply) -> "np.ndarray":
    """The actions of an answer to `act`, float32 `[T, D]`. Raises BadMessage for an answer without."""
    from nexus_bus.tensors import from_tensor

    if reply.actions is None:
        raise BadMessage("actions: none in this answer")
    return from_tensor(reply.actions)
