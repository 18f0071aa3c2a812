"""The feature cache of a host: what one worker encoded, the worker beside it does not encode again.

Content-addressed within a scope, so nothing is ever invalid and a hash is no permission: an entry answers only its own scope,
a tenant or "public", and nobody learns, not even from the time it takes, what another tenant has shown. In memory an LRU;
below it, if a directory is given, the disk (cache_disk.py).
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache_disk import DiskCache
from nexus_bus.models.features import Look, VLAFeature

Key = tuple[str, str]  # scope, feature id


@dataclass(frozen=True)
class ScopeStats:
    """What the cache did for one scope in this process, and the bytes it holds."""

    hits: int
    misses: int
    evictions: int  # from the disk, or from memory where there is no disk
    memory_bytes: int
    disk_bytes: int  # of all processes together


class FeatureCache:
    """Features by scope and content id, bounded in memory and on disk. Called from one thread at a time; stats from any."""

    def __init__(self, directory: Path | None = None, memory_bytes: int = 256 << 20, disk_bytes: int = 1 << 30) -> None:
        """Without a directory it lives in memory alone."""
        self.disk = DiskCache(directory, disk_bytes) if directory is not None else None
        self._memory: OrderedDict[Key, VLAFeature] = OrderedDict()
        self._memory_bound, self._memory_used = memory_bytes, 0
        self._hits, self._misses, self._evictions = Counter[str](), Counter[str](), Counter[str]()
        self._bytes: Counter[str] = Counter()  # in memory, by scope

    def get(self, scope: str, feature_id: str) -> VLAFeature | None:
        """The feature, if this scope has it."""
        key = (scope, feature_id)
        feature = self._memory.get(key)
        if feature is not None:
            self._memory.move_to_end(key)
            if self.disk is not None:
                self.disk.touch(scope, feature_id)
        elif self.disk is not None and (feature := self.disk.read(scope, feature_id)) is not None:
            self._remember(scope, feature)
        if feature is None:
            self._misses[scope] += 1
        else:
            self._hits[scope] += 1
        return feature

    def put(self, scope: str, feature: VLAFeature) -> None:
        """Keep a feature for its scope. A full disk is not an error: the cache is a convenience."""
        self._remember(scope, feature)
        if self.disk is not None:
            self.disk.write(scope, feature)

    @property
    def memory_used(self) -> int:
        """Bytes held in memory."""
        return self._memory_used

    def stats(self) -> dict[str, ScopeStats]:
        """By scope."""
        disk = self.disk.sizes() if self.disk is not None else {}
        evictions = dict(self.disk.evictions if self.disk is not None else self._evictions)
        hits, misses, memory = dict(self._hits), dict(self._misses), dict(self._bytes)
        return {
            scope: ScopeStats(*(counts.get(scope, 0) for counts in (hits, misses, evictions, memory, disk)))
            for scope in sorted(hits.keys() | misses.keys() | memory.keys() | disk.keys())
        }

    def gauges(self) -> dict[str, float]:
        """Sums over all scopes, for a heartbeat."""
        rows = self.stats().values()
        names = ("hits", "misses", "evictions", "memory_bytes", "disk_bytes")
        found = {f"cache_{name}": float(sum(getattr(row, name) for row in rows)) for name in names}
        return found | {"cache_faults": float(self.disk.faults if self.disk is not None else 0)}

    def close(self) -> None:
        """Let go of the disk; what is there stays."""
        if self.disk is not None:
            self.disk.close()

    def _remember(self, scope: str, feature: VLAFeature) -> None:
        key = (scope, feature.feature_id)
        if (old := self._memory.pop(key, None)) is not None:
            self._count(scope, -old.nbytes)
        self._memory[key] = feature
        self._count(scope, feature.nbytes)
        while self._memory_used > self._memory_bound:
            (owner, _), oldest = self._memory.popitem(last=False)
            self._count(owner, -oldest.nbytes)
            self._evictions[owner] += 1

    def _count(self, scope: str, change: int) -> None:
        self._memory_used += change
        self._bytes[scope] += change


@dataclass(frozen=True)
class EncodeStats:
    """What a grouped encode did."""

    total: int  # looks asked for
    unique: int  # different ones among them
    hits: int  # of the different ones, found in the cache
    forward_s: float  # time of the forwards, image preparation included
    groups: int  # forwards
    forwarded: Mapping[Key, int]  # rows that each (scope, id) cost in the forward
    tokens: Mapping[Key, int]  # … and their tokens, by which its time is shared out

    def share(self, own: Mapping[Key, int], everybody: Mapping[Key, int]) -> float:
        """Seconds of the forward that one asker owes, by tokens; a row that several asked for is split among them.

        Args:
            own: how often the asker asked for each key.
            everybody: how often all askers together did.
        """
        tokens = sum(self.tokens.get(key, 0) * count / everybody[key] for key, count in own.items())
        return self.forward_s * tokens / sum(self.tokens.values()) if tokens else 0.0


def encode_cached(
    backbone: Backbone,
    looks: Sequence[Look],
    cache: FeatureCache | None = None,
    ids: Sequence[str] | None = None,
) -> tuple[list[VLAFeature], EncodeStats]:
    """Features of all looks, in their order; equal looks of a scope are encoded once, known ones not at all.

    A look with an adapter or a suffix, and one that names no scope, shares nothing and is not kept.
    `ids` are the looks' names where the caller has asked `backbone.ids` for them already.

    Raises:
        BadMessage: a prompt that cannot be shown to the backbone.
    """
    ids = backbone.ids(looks) if ids is None else ids
    # What is encoded once: a key for looks that may share, for the others their own position.
    places: list[Key | int] = [
        (look.scope, name) if look.scope and look.frozen else i for i, (name, look) in enumerate(zip(ids, looks, strict=True))
    ]
    found: dict[Key | int, VLAFeature] = {}
    missing: dict[Key | int, int] = {}
    for i, place in enumerate(places):
        if place in found or place in missing:
            continue
        if cache is not None and isinstance(place, tuple) and (known := cache.get(*place)) is not None:
            found[place] = known
        else:
            missing[place] = i
    hits = len(found)
    started = time.perf_counter()
    made = backbone.encode([looks[i] for i in missing.values()]) if missing else []
    forward_s = time.perf_counter() - started if missing else 0.0
    found.update(zip(missing, made, strict=True))
    if cache is not None:
        for place in missing:
            if isinstance(place, tuple):
                cache.put(place[0], found[place])
    tokens = Counter[Key]()
    for place, i in missing.items():
        tokens[looks[i].scope, ids[i]] += len(found[place].hidden)
    stats = EncodeStats(
        total=len(looks),
        unique=len(found),
        hits=hits,
        forward_s=forward_s,
        groups=-(-len(missing) // backbone.tile),
        forwarded=Counter((looks[i].scope, ids[i]) for i in missing.values()),
        tokens=tokens,
    )
    return [found[place] for place in places], stats
