"""Finds the record whose trace tells the whole story."""

from nexus_bus.bus import Bus
from schemas.control import Span


async def most_told_record(bus: Bus, jobs: list[tuple[str, str]]) -> list[Span]:
    """Spans of a record that went all the way, from environment step to published version; the shortest such trace."""
    traces: dict[str, list[Span]] = {}
    wanted: dict[str, bool] = {}
    async for item in bus.tail("trace", since="all", follow=False, worker="*"):
        for span in item.message.spans:
            traces.setdefault(span.trace_id, []).append(span)
            if span.name == "policy.publish":
                wanted[span.trace_id] = True
    told = [
        spans
        for trace, spans in traces.items()
        if trace in wanted
        and any(s.name == "rollout.episode" and (s.attributes.get("tenant"), s.attributes.get("job")) in jobs for s in spans)
    ]
    return min(told, key=len, default=[])
