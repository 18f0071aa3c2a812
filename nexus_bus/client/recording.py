"""Record a dataset from a policy of the service, in an environment of the service or of the tenant's own.

A session gives one observation for each call, and a frame needs its own: actions are stepped one by one, and the policy is
asked anew only when as many of a chunk were executed as it is trained or told for.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from nexus_bus.client.sessions import ACT_S, chunk, observed
from nexus_bus.client.sync import Client, Session
from nexus_bus.clock import derive_seed
from nexus_bus.data.record import Keep, Progress, Take, features_of, fps_of, record
from nexus_bus.data.writer import DatasetInfo, DatasetWriter
from nexus_bus.errors import BadJob, EnvironmentFault, NotFound, Unavailable
from schemas.environment import Observation, SessionReply
from schemas.job import EnvironmentSpec
from schemas.policy import PolicyVersion

TRIES = 5  # of one episode, the first included
PAUSE_S = 0.5  # before the second, twice as long before each further one: a worker may be starting again
LEASE_S = 60.0 + ACT_S

Tell = Callable[[str], None]


def record_policy(  # noqa: PLR0913 - each by its name
    client: Client,
    policy: str,
    spec: EnvironmentSpec,
    root: Path | str,
    *,
    episodes: int,
    seed: int = 0,
    greedy: bool = True,
    keep: Keep = "successes",
    pictures: str = "image",
    fps: int | None = None,
    progress: Progress | None = None,
    tell: Tell | None = None,
) -> DatasetInfo:
    """Record `episodes` episodes of a policy into a LeRobot v3.0 dataset here; nothing is left behind if it fails.

    Attempt n is the environment's trial n of `seed`, and the policy's draws depend on both: where the simulator is
    deterministic, the same call records the same bytes.

    Args:
        policy: `<job>@<n>` or `<job>@latest`.
        spec: `execute` says how many actions of a chunk are executed; unset: all.
        greedy: False samples.
        keep: all episodes, or successful ones alone.
        fps: default the environment's.
        progress: see nexus_bus.data.record.record.
        tell: is told of every episode that is played again.

    Raises:
        NotFound: no such version, environment or task.
        ContractError: policy and environment do not fit, or it succeeds too rarely.
        BadJob: more actions are to be executed than a chunk has.
        EnvironmentFault, Unavailable: one episode failed again and again.
    """
    version = client.policy(policy)
    if version.retired:
        raise NotFound(f"policy: {version.id} was retired on {version.retired[:19]}; its weights are gone")
    contract = version.contract
    if spec.execute is not None and spec.execute > contract.horizon:
        raise BadJob(f"execute: {spec.execute} actions of a chunk of {contract.horizon}")
    with _Player(client, version, spec, seed, greedy, tell) as player:
        features = features_of(player.found.action, player.found.observation, pictures)
        return record(
            player.play,
            DatasetWriter(root, fps or fps_of(spec.id), features, spec.id),
            who=f"{version.id} in {spec.id}/{spec.task}",
            episodes=episodes,
            keep=keep,
            progress=progress,
        )


class _Player:
    """Plays episodes in a session, and in another one where the first was lost."""

    def __init__(
        self, client: Client, version: PolicyVersion, spec: EnvironmentSpec, seed: int, greedy: bool, tell: Tell | None
    ) -> None:
        self.client, self.version, self.spec, self.seed, self.greedy, self.tell = client, version, spec, seed, greedy, tell
        self.execute = spec.execute or version.contract.horizon
        self.held = ExitStack()
        self.session: Session | None = self._open()  # what is wrong with the request shows at once, and is not tried again
        self.found = self.session.found

    def __enter__(self) -> "_Player":
        return self

    def __exit__(self, *_: object) -> None:
        self.held.close()

    def _open(self) -> Session:
        contract = self.version.contract
        return self.held.enter_context(
            self.client.session(self.spec, lease_s=LEASE_S, action=contract.action, observation=contract.observation)
        )

    def play(self, attempt: int) -> Take:
        """An episode from its reset to its end, however often it takes; what was half played is dropped."""
        for tried in range(1, TRIES + 1):
            try:
                if self.session is None:
                    self.session = self._open()
                return self._episode(self.session, attempt)
            except (EnvironmentFault, Unavailable) as error:
                self.session = None
                self.held.close()
                if tried == TRIES:
                    raise type(error)(f"episode {attempt} of seed {self.seed} failed {TRIES} times: {error}") from error
                if self.tell is not None:
                    self.tell(f"episode {attempt} is played again: {error}")
                time.sleep(PAUSE_S * 2 ** (tried - 1))
        raise AssertionError("the last try returns or raises")

    def _episode(self, session: Session, attempt: int) -> Take:
        take = Take(self.found.observation.cameras)
        noise_seed, decisions = derive_seed(self.seed, "policy", attempt), 0
        reply = _there(lambda: session.reset(self.seed, attempt))
        while not (reply.terminated or reply.truncated):
            seed = (noise_seed + decisions * 7919) % 2**48
            answer = self.client.act(self.version.id, _seen(reply), greedy=self.greedy, seed=seed)
            decisions += 1
            for action in chunk(answer)[: self.execute]:
                seen = observed(reply)
                reply = _there(lambda action=action: session.step(action[None]))
                if not reply.successes:
                    raise EnvironmentFault("the environment executed no action and did not end the episode")
                take.add(seen, action, reply.successes[-1])
                if reply.terminated or reply.truncated:
                    break
        return take


def _there(call: Callable[[], SessionReply]) -> SessionReply:
    """A session that is gone was lost with its worker."""
    try:
        return call()
    except NotFound as error:
        raise EnvironmentFault(str(error)) from error


def _seen(reply: SessionReply) -> Observation:
    if reply.observation is None:
        raise EnvironmentFault("the environment answered without an observation")
    return reply.observation
