"""A trace as text: one line per span, indented by parent, placed by time. Many alike siblings become one line."""

from collections import defaultdict

from schemas.control import Span

NAME = 38
MANY = 3  # alike siblings shown one by one; more become one line


def render(spans: list[Span], width: int = 140) -> str:
    """The waterfall of one trace.

    Args:
        spans: all of one trace, in any order.
        width: characters per line.
    """
    if not spans:
        return "no spans"
    known = {span.span_id for span in spans}
    children: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: (s.start_ns, s.span_id)):
        children[span.parent_id if span.parent_id in known else ""].append(span)
    first = min(span.start_ns for span in spans)
    last = max(span.end_ns for span in spans)
    bar = max(20, width - NAME - 13 - 34)
    scale = bar / max(1, last - first)
    lines = [f"trace {spans[0].trace_id}   {(last - first) / 1e6:.1f} ms, {len(spans)} spans"]

    def place(start: int, end: int) -> str:
        left = int((start - first) * scale)
        return (" " * left + "█" * max(1, round((end - start) * scale)))[:bar].ljust(bar)

    def show(group: list[Span], depth: int) -> None:
        head = group[0]
        start, end = head.start_ns, max(span.end_ns for span in group)
        busy = sum(span.end_ns - span.start_ns for span in group)
        name = "  " * depth + head.name + (f" ×{len(group)}" if len(group) > 1 else "")
        lines.append(
            f"{name[:NAME]:<{NAME}} {head.worker[:12]:<12} {place(start, end)} {(start - first) / 1e6:8.1f} {busy / 1e6:8.2f} ms {_told(group)}"
            .rstrip()[:width]
        )
        below = [child for span in group for child in children.get(span.span_id, [])]
        for inner in _grouped(below):
            show(inner, depth + 1)

    for group in _grouped(children[""]):
        show(group, 0)
    return "\n".join(lines)


def _grouped(spans: list[Span]) -> list[list[Span]]:
    """Alike siblings together, where there are many; in order of their first start."""
    by_name: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_name[span.name].append(span)
    groups = [group for alike in by_name.values() for group in ([alike] if len(alike) > MANY else [[span] for span in alike])]
    return sorted(groups, key=lambda group: group[0].start_ns)


def _told(group: list[Span]) -> str:
    """What is worth a word: who it was grouped with, which version, an error."""
    span = group[-1]
    words: list[str] = []
    if any(s.status == "error" for s in group):
        words.append("ERROR")
    for key, text in (("group", "group of {}"), ("tenants", "{} tenants"), ("policy", "{}"), ("batch", "batch {}")):
        if key in span.attributes:
            words.append(text.format(span.attributes[key]))
    return "· " + ", ".join(words) if words else ""
