"""One simulator held for one episode at a time: the same rules for every adapter. Between workers/environment.py and adapters.

The order is reset, then steps until the episode ends, then reset again. A policy's mistake (a wrong shape, a number that is
not finite) is refused before the simulator sees it; a simulator's mistake is an `EnvironmentFault` and never a reward.
"""

import dataclasses
import math

import msgspec
import numpy as np

from nexus_bus.bounds import outside
from nexus_bus.clock import derive_seed
from nexus_bus.envs import catalog
from nexus_bus.envs.simulator import Moment, Numbered, Observed
from nexus_bus.envs.stepped import Stepped, termination, transition, truncation
from nexus_bus.errors import BadJob, BadMessage, ContractError, EnvironmentFault, NexusError
from schemas.base import Count
from schemas.environment import EndReason
from schemas.job import MAX_HORIZON, EnvironmentSpec

__all__ = ["Observed", "Session", "Stepped"]


class _Saved(msgspec.Struct):
    environment: str
    steps: Count
    end: EndReason
    simulator: bytes


class Session:
    """A simulator with its rules. All calls from one thread.

    Raises:
        NotFound, BadJob: the spec names something that does not exist or is not installed.
        Unavailable: the machine cannot draw; the text names the package that is missing.
        EnvironmentFault: the simulator could not be made.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.spec = spec
        self.description = catalog.describe(spec)
        self.steps = 0  # since reset
        self.end: EndReason | None = None  # None before the first reset
        self._end_on_success = bool(catalog.options_of(spec)["end_on_success"])
        self._low = np.array(self.description.action.low)
        self._high = np.array(self.description.action.high)
        with _faults("open"):
            self._simulator = catalog.build(spec)

    def reset(self, seed: int, trial: int = 0) -> Observed:
        """Start the episode that (seed, trial) names: the same pair gives the same episode to the bit, pictures included."""
        with _faults("reset"):
            if isinstance(self._simulator, Numbered):
                self._simulator.choose(trial)
            self._simulator.reset(derive_seed(seed, "trial", trial))
            self.steps, self.end = 0, "running"
            return self._observe()

    def step(self, actions: np.ndarray) -> Stepped:
        """Execute a chunk `[n, D]`, clipped to the action's bounds, up to the end of the episode; the picture is of the end.

        Raises:
            ContractError: wrong shape, or a value that is not finite; nothing was executed.
            BadMessage: no episode is running.
        """
        if self.end != "running":
            raise BadMessage(
                "step: no episode is running; reset first" if self.end is None else f"step: over ({self.end}); reset first"
            )
        given = self._checked(actions)
        rewards: list[float] = []
        successes: list[bool] = []
        terminated = truncated = False
        with _faults("step"):
            for action in given.clip(self._low, self._high):
                moment = self._simulator.act(action)
                if not math.isfinite(moment.reward):
                    raise EnvironmentFault(f"{self.spec.id}: reward {moment.reward} at step {self.steps + 1}")
                self.steps += 1
                rewards.append(float(moment.reward))
                successes.append(bool(moment.success))
                terminated, truncated = self._ended(moment)
                if terminated or truncated:
                    break
            observed = self._observe()
        ending = termination if terminated else truncation if truncated else transition
        clipped = outside(given[: len(rewards)], self._low, self._high)
        stepped = dataclasses.replace(ending(observed, rewards, successes), clipped=clipped)
        self.end = stepped.end
        return stepped

    def render(self) -> np.ndarray:
        """The first camera's picture of this moment, HWC uint8. Raises BadMessage before the first reset."""
        self._require_reset("render")
        with _faults("render"):
            return next(iter(self._observe().images.values()))

    def expert(self) -> np.ndarray:
        """The scripted expert's action here, float32 `[D]`. Raises NotFound where there is none."""
        self._require_reset("expert")
        with _faults("expert"):
            return np.clip(self._simulator.expert(), self._low, self._high).astype(np.float32)

    def save(self) -> bytes:
        """The whole episode, for `restore`. Raises NotFound where the simulator cannot."""
        end = self._require_reset("save")
        with _faults("save"):
            return msgspec.msgpack.encode(_Saved(self._kind(), self.steps, end, self._simulator.save()))

    def restore(self, state: bytes) -> Observed:
        """Continue a saved episode of the same environment as if it had never been left. Raises BadMessage, NotFound."""
        try:
            saved = msgspec.msgpack.decode(state, type=_Saved)
        except msgspec.MsgspecError as error:
            raise BadMessage(
                f"state: {len(state)} bytes that are not a saved session ({error}); give what save() of the same environment "
                "and task gave"
            ) from error
        if saved.environment != self._kind():
            raise BadMessage(f"state: saved from {saved.environment}, this session is {self._kind()}")
        with _faults("restore"):
            self._simulator.restore(saved.simulator)
            self.steps, self.end = saved.steps, saved.end
            return self._observe()

    def leave(self) -> None:
        """End the episode early; the next call has to be a reset or a restore."""
        self.end = None

    def close(self) -> None:
        """Free the simulator. Calling it twice does nothing."""
        self._simulator.close()

    def _kind(self) -> str:
        return f"{self.description.simulator} {self.spec.task}"

    def _require_reset(self, call: str) -> EndReason:
        if self.end is None:
            raise BadMessage(f"{call}: no episode yet; reset first")
        return self.end

    def _ended(self, moment: Moment) -> tuple[bool, bool]:
        terminated = moment.terminated or (moment.success and self._end_on_success)
        return terminated, not terminated and (moment.truncated or self.steps >= self.description.max_steps)

    def _checked(self, actions: np.ndarray) -> np.ndarray:
        size = self.description.action.size
        if actions.ndim != 2 or actions.shape[1] != size or not 0 < len(actions) <= MAX_HORIZON:
            raise ContractError(f"actions: shape {list(actions.shape)}, expected [1..{MAX_HORIZON}, {size}] for {self.spec.id}")
        if actions.dtype.kind not in "fiu":
            raise ContractError(f"actions: dtype {actions.dtype}, expected float32")
        finite = np.isfinite(actions)
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            raise ContractError(f"actions[{row}, {column}]: {actions[row, column]} is not finite; nothing was executed")
        return actions.astype(np.float64)

    def _observe(self) -> Observed:
        observed = self._simulator.observe()
        if not np.isfinite(observed.state).all():
            raise EnvironmentFault(f"{self.spec.id}: the simulation became unstable at step {self.steps}: state is not finite")
        return observed


class _faults:  # noqa: N801 - reads as the statement it is
    """Anything a simulator raises by accident becomes an EnvironmentFault; what we raise on purpose passes, but for
    what is held against the job once it is open: it fitted then, and a camera that fails later is the simulator's fault.
    """

    def __init__(self, call: str) -> None:
        self.call = call

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BadJob) and self.call != "open":
            raise EnvironmentFault(f"{self.call}: {error}") from error
        if isinstance(error, Exception) and not isinstance(error, NexusError):
            raise EnvironmentFault(f"{self.call}: {type(error).__name__}: {error}") from error
