"""Episodes of evaluations into the logs EVALS and FILMS. The rollout worker's; it records before it reports.

A record's id names tenant, job, purpose, task and trial, so that an episode which is played again after a crash is recorded
once. A film has a place that is taken once, whoever asks: the first failures and the first successes of an evaluation.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from nexus_bus.bus import Bus
from nexus_bus.bus.headers import EXPECTED_REVISION
from nexus_bus.errors import BadMessage, Conflict, Unavailable
from nexus_bus.evaluation.films import MediaType, film
from schemas.environment import Observation
from schemas.evaluation import EvaluationEpisode, EvaluationFilm

FILM_S = 5.0  # to store a film; without one a score is as good
TOLD = 1000  # characters of an instruction
KNOWN = 4096  # evaluations of which it is remembered which places are taken

_FREE = {EXPECTED_REVISION: "0"}  # nothing may be there yet


class Recorder:
    """Writes records, and films as long as there is place."""

    def __init__(self, bus: Bus, log: Any) -> None:
        self.bus, self.log = bus, log
        self.taken: OrderedDict[tuple[str, str, str], int] = OrderedDict()  # (tenant, job, kind) → places known as taken

    async def record(self, tenant: str, episode: EvaluationEpisode, seen: Sequence[Observation], films: int) -> None:
        """Store an episode, with a film of what the policy has seen if fewer than `films` of its outcome are there.

        Raises Unavailable: it is not stored, and must not be reported.
        """
        name = await self._film(tenant, episode, seen, films)
        stored = msgspec.structs.replace(episode, film=name)
        msg_id = f"{tenant}/{episode.job}/{episode.purpose}/{episode.task}/{episode.trial}"
        await self.bus.publish("eval.episode", stored, msg_id=msg_id, tenant=tenant, job=episode.job)

    async def _film(self, tenant: str, episode: EvaluationEpisode, seen: Sequence[Observation], films: int) -> str:
        kind = f"{episode.purpose}-{'success' if episode.success else 'failure'}"
        key = tenant, episode.job, kind
        made: tuple[MediaType, bytes] | None = None
        try:
            while self.taken.get(key, 0) < films:
                made = made or await asyncio.to_thread(film, seen)
                if made is None or (place := self.taken.get(key, 0)) >= films:
                    break
                shown = EvaluationFilm(
                    job=episode.job, purpose=episode.purpose, task=episode.task, trial=episode.trial, success=episode.success,
                    instruction=seen[0].instruction[:TOLD], media_type=made[0], data=made[1],
                )  # fmt: skip
                name = f"{kind}-{place}"
                self._take(key, place)
                try:
                    await self.bus.publish(
                        "eval.film", shown, msg_id=f"{tenant}/{episode.job}/{name}/{episode.task}/{episode.trial}",
                        deadline=FILM_S, headers=_FREE, tenant=tenant, job=episode.job, film=name,
                    )  # fmt: skip
                except Conflict:  # somebody else's: the next place
                    continue
                return name
        except (BadMessage, Unavailable) as error:
            self.log.warning("an episode has no film", job=episode.job, task=episode.task, trial=episode.trial, why=str(error))
        return ""

    def _take(self, key: tuple[str, str, str], place: int) -> None:
        """Before it is stored: several episodes end side by side, and each tries a place of its own."""
        self.taken[key] = max(place + 1, self.taken.get(key, 0))
        self.taken.move_to_end(key)
        while len(self.taken) > KNOWN:
            self.taken.popitem(last=False)
