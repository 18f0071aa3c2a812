"""The feature cache of a host: what one worker encoded, the worker beside it does not encode again.

Content-addressed, so nothing is ever invalid. In memory an LRU; below it, if a directory is given, one file a feature,
shared by any number of processes: files appear whole (written aside, then renamed), the oldest go when the bound is passed.
"""

import contextlib
import json
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from nexus_bus.models.features import VLAFeature

if TYPE_CHECKING:  # a process that only reads the cache need not load transformers
    from nexus_bus.models.backbone import Backbone
    from nexus_bus.models.prompt import Prompt


class FeatureCache:
    """Features by content id, bounded in memory and on disk."""

    def __init__(self, directory: Path | None = None, memory_bytes: int = 256 << 20, disk_bytes: int = 1 << 30) -> None:
        """Without a directory it lives in memory alone."""
        self.directory = directory
        self._memory: OrderedDict[str, VLAFeature] = OrderedDict()
        self._memory_bound, self._memory_used = memory_bytes, 0
        self._disk_bound, self._written = disk_bytes, 0
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._trim()

    def get(self, feature_id: str) -> VLAFeature | None:
        """The feature, or None."""
        feature = self._memory.get(feature_id)
        if feature is not None:
            self._memory.move_to_end(feature_id)
            return feature
        feature = self._read(feature_id)
        if feature is not None:
            self._remember(feature)
        return feature

    def put(self, feature: VLAFeature) -> None:
        """Keep a feature. A full disk is not an error: the cache is a convenience."""
        self._remember(feature)
        if self.directory is None:
            return
        path = self._path(feature.feature_id)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        data = save(
            {"hidden": feature.hidden.contiguous(), "token_type": feature.token_type.contiguous()},
            metadata={"query_span": json.dumps(feature.query_span)},
        )
        try:
            path.parent.mkdir(exist_ok=True)
            aside.write_bytes(data)
            aside.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()
            return
        self._written += len(data)
        if self._written > self._disk_bound // 16:  # others write too: look at what is really there now and then
            self._trim()

    @property
    def memory_used(self) -> int:
        """Bytes held in memory."""
        return self._memory_used

    def _path(self, feature_id: str) -> Path:
        if self.directory is None:
            raise ValueError("this cache has no directory")
        return self.directory / feature_id[:2] / feature_id

    def _remember(self, feature: VLAFeature) -> None:
        if (old := self._memory.pop(feature.feature_id, None)) is not None:
            self._memory_used -= old.nbytes
        self._memory[feature.feature_id] = feature
        self._memory_used += feature.nbytes
        while self._memory_used > self._memory_bound:
            _, oldest = self._memory.popitem(last=False)
            self._memory_used -= oldest.nbytes

    def _read(self, feature_id: str) -> VLAFeature | None:
        if self.directory is None:
            return None
        path = self._path(feature_id)
        try:
            with safe_open(path, "pt") as file:
                feature = VLAFeature(
                    feature_id=feature_id,
                    hidden=file.get_tensor("hidden"),
                    token_type=file.get_tensor("token_type"),
                    query_span=tuple(json.loads(file.metadata()["query_span"])),
                )
        except OSError:
            return None
        except (SafetensorError, KeyError, ValueError):  # cut short by a crash of the machine: encode it again
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # recently used
        return feature

    def _trim(self) -> None:
        """Drop the least recently used files until a fifth of the bound is free."""
        if self.directory is None:
            return
        self._written = 0
        files: list[tuple[float, int, str]] = []
        for folder in os.scandir(self.directory):
            if folder.is_dir():
                for entry in os.scandir(folder.path):
                    with contextlib.suppress(OSError):
                        stat = entry.stat()
                        files.append((stat.st_mtime, stat.st_size, entry.path))
        total = sum(size for _, size, _ in files)
        if total <= self._disk_bound:
            return
        for _, size, path in sorted(files):
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
            if total <= self._disk_bound * 4 // 5:
                return


@dataclass(frozen=True)
class EncodeStats:
    """What a grouped encode did."""

    total: int  # prompts asked for
    unique: int  # different ones among them
    hits: int  # of the different ones, found in the cache
    forward_s: float  # time of the forwards, image preparation included
    groups: int  # forwards
    forwarded: frozenset[str]  # ids that needed the forward, so that its cost can be shared out


def encode_cached(
    backbone: "Backbone",
    prompts: "Sequence[Prompt]",
    cache: FeatureCache | None = None,
    layers: Sequence[int] = (-1,),
    ids: Sequence[str] | None = None,
) -> tuple[list[VLAFeature], EncodeStats]:
    """Features of all prompts, in their order; equal prompts are encoded once, known ones not at all.

    `ids` are the prompts' names where the caller has asked `backbone.ids` for them already.

    Raises:
        BadMessage: a prompt that cannot be shown to the backbone.
    """
    ids = backbone.ids(prompts, layers) if ids is None else ids
    found: dict[str, VLAFeature] = {}
    missing: dict[str, Prompt] = {}
    for name, prompt in zip(ids, prompts, strict=True):
        if name in found or name in missing:
            continue
        if cache is not None and (known := cache.get(name)) is not None:
            found[name] = known
        else:
            missing[name] = prompt
    hits = len(found)
    started = time.perf_counter()
    for feature in backbone.encode(list(missing.values()), layers):
        found[feature.feature_id] = feature
    forward_s = time.perf_counter() - started
    if cache is not None:
        for name in missing:
            cache.put(found[name])
    stats = EncodeStats(
        total=len(prompts),
        unique=len(found),
        hits=hits,
        forward_s=forward_s if missing else 0.0,
        groups=-(-len(missing) // backbone.tile),
        forwarded=frozenset(missing),
    )
    return [found[name] for name in ids], stats
