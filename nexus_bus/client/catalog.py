"""What a job may name: what ships with the service, and what is the tenant's own."""

from typing import Any

from nexus_bus.client.datasets import DatasetCalls
from nexus_bus.errors import NotFound
from schemas.dataset import DatasetInfo
from schemas.environment import OwnFound, OwnPage, OwnQuery

Catalog = dict[str, dict[str, dict[str, Any]]]  # kind, name, what there is to say about it


class CatalogCalls(DatasetCalls):
    """Everything a tenant asks before it writes a job."""

    async def catalog(self) -> Catalog:
        """Bases, families, heads, environments and datasets by name: those of everybody, and those of the tenant alone."""
        found = shipped()
        found["environment"] |= {one.environment: own_environment(one) for one in await self.own_environments()}
        return found | {"dataset": {one.dataset: dataset(one) for one in await self.datasets()}}

    async def own_environments(self) -> list[OwnFound]:
        """Environments of the tenant's own that workers of it serve right now, by id."""
        found: list[OwnFound] = []
        query = OwnQuery()
        while True:
            page: OwnPage = await self.call("env.list", query)
            found += page.environments
            if not page.next:
                return found
            query = OwnQuery(after=page.next)


def own_environment(one: OwnFound) -> dict[str, Any]:
    """As an entry of the catalogue."""
    from nexus_bus.envs.offered import options

    sessions = f"{one.sessions} session{'s' * (one.sessions != 1)}"
    return {
        "summary": f"your own, served by {', '.join(one.workers)}, {sessions} at once ({one.simulator})",
        "tasks": {task: (sentence,) for task, sentence in one.tasks.items()},
        "options": _options(options(one.max_steps)),
        "expert": False,
        "gl": False,
    }


def dataset(one: DatasetInfo) -> dict[str, Any]:
    """As an entry of the catalogue."""
    about = f"{one.episodes} episodes, {one.frames} frames, {one.bytes / 1e6:,.1f} MB"
    return {"summary": about, "features": dict(one.features)}


def shipped(name: str | None = None) -> Catalog:
    """What every tenant may name; of heads that are installed only the one of this name is loaded."""
    from nexus_bus.envs.catalog import ENVIRONMENTS
    from nexus_bus.models.bases import SHIPPED

    return {
        "base": {key: base(key) for key in SHIPPED},
        "family": _families(),
        "head": _heads(name),
        "environment": {
            key: {
                "summary": env.summary,
                "tasks": dict(env.tasks),
                "options": _options(env.options),
                "expert": env.expert,
                "gl": env.gl,
            }
            for key, env in ENVIRONMENTS.items()
        },
    }


def elsewhere(name: str) -> Catalog:
    """A base that does not ship. Raises NotFound."""
    try:
        return {"base": {name: base(name)}}
    except NotFound as error:
        raise NotFound(f"{name!r} is neither a head nor an environment or dataset, and as a base: {error}") from None


def _heads(name: str | None) -> dict[str, dict[str, Any]]:
    """Shipped heads whole; installed ones by name, for only the one that is asked for is imported."""
    from nexus_bus.models.catalog import HEADS, head_entry, installed

    points = installed()
    whole = HEADS if name not in points else {**HEADS, name: head_entry(name)}
    found: dict[str, dict[str, Any]] = {
        key: {"summary": head.summary, "rl": head.rl, "tiers": head.tiers, "options": _options(head.options)}
        for key, head in whole.items()
    }
    for key, point in points.items():
        found.setdefault(key, {"summary": f"installed: {point.value}; `nexus catalog {key}` shows its options"})
    return found


def base(name: str) -> dict[str, Any]:
    """A backbone, with what a plan checks of it."""
    from nexus_bus.models.bases import describe_backbone

    info = describe_backbone(name)
    return {
        "summary": f"a {info.model_type}, {info.hidden} wide, {info.layers} layers; {info.tokens_per_view} tokens a view of "
        f"{info.image_size} pixels, {info.max_tokens} a prompt, {info.query_tokens} of them queries",
        "model_type": info.model_type,
        "hidden": info.hidden,
        "layers": info.layers,
        "image_size": info.image_size,
        "image_step": info.image_step,
        "tokens_per_view": info.tokens_per_view,
        "max_tokens": info.max_tokens,
        "query_tokens": info.query_tokens,
        "tiers": info.tiers,
        "suffixes": info.suffixes,
        "path": str(info.path),
    }


def _families() -> dict[str, dict[str, Any]]:
    """Kinds of checkpoints that a directory or a hub id may hold."""
    from nexus_bus.models.bases import KINDS, PAIR, PAIR_TEXTS, PAIR_VISIONS

    pair = f"a nexus.json that names a vision encoder ({', '.join(PAIR_VISIONS)}) and a text encoder ({', '.join(PAIR_TEXTS)})"
    tiers = "tier frozen, lora"
    return {
        **{
            key: {"summary": f"{tiers}; heads may append tokens" if kind.suffixes else tiers, "suffixes": kind.suffixes}
            for key, kind in KINDS.items()
        },
        PAIR: {"summary": f"{pair}; tier frozen", "suffixes": False},
    }


def _options(options: Any) -> dict[str, tuple[Any, str]]:
    return {name: (option.default, option.meaning) for name, option in options.items()}
