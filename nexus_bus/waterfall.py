"""A trace as text: who did what, under whom, when and for how long. Pure; `nexus trace`, the demo and dashboards print it.

After the line: it reads the spans that the TRACES stream holds. Children stand under their parents; repeated siblings become
one row (`environment.step ×9`) whose bar shows each of them, and what happened below them is gathered the same way.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from schemas.control import Span

ALONE = 2  # this many siblings of one name stay rows of their own; more become one
RAMP = " ░▒▓█"  # share of a cell's time that is covered
SIZES = ("group", "records")  # attributes that count the members of grouped work
NAMES = ("record", "policy")  # attributes that tell a span from its like
MIN_BAR = 20


@dataclass(frozen=True)
class Row:
    """One line: a span, or several siblings of one name."""

    depth: int
    lead: str  # the branches of the tree left of the name
    spans: tuple[Span, ...]  # in order of their start

    @property
    def first(self) -> Span:
        """The span that gives the row its name."""
        return self.spans[0]

    @property
    def title(self) -> str:
        """Name, how many, of what, what it was grouped with, and its error."""
        many = f" ×{len(self.spans)}" if len(self.spans) > 1 else ""
        what = "".join(f" {values.pop()}" for name in NAMES if len(values := self._values(name)) == 1)
        wrong = [span for span in self.spans if span.status == "error"]
        error = f" ✗ {wrong[0].attributes.get('error', 'error')}" if wrong else ""
        return f"{self.first.name}{many}{what}{_linked(self.spans)}{error}"

    @property
    def start_ns(self) -> int:
        """When the first began."""
        return self.first.start_ns

    @property
    def end_ns(self) -> int:
        """When the last ended."""
        return max(span.end_ns for span in self.spans)

    @property
    def total_ns(self) -> int:
        """Time of all of them together."""
        return sum(span.end_ns - span.start_ns for span in self.spans)

    def _values(self, name: str) -> set[str]:
        return {str(span.attributes[name]) for span in self.spans if name in span.attributes}


def rows(spans: Iterable[Span]) -> list[Row]:
    """The tree in reading order. Spans whose parent is not among them are roots; a span given twice counts once."""
    known = {span.span_id: span for span in spans}
    below: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(known.values(), key=lambda s: (s.start_ns, -s.end_ns, s.span_id)):
        below[span.parent_id if span.parent_id in known else ""].append(span)
    found: list[Row] = []

    def walk(children: list[Span], depth: int, stem: str, alone: int) -> None:
        groups = _siblings(children, alone)
        for number, group in enumerate(groups, 1):
            branch, further = ("", "") if depth == 0 else ("└ ", "  ") if number == len(groups) else ("├ ", "│ ")
            found.append(Row(depth, stem + branch, tuple(group)))
            inner = [child for span in group for child in below[span.span_id]]
            walk(inner, depth + 1, stem + further, alone if len(group) == 1 else 1)

    walk(below[""], 0, "", ALONE)
    return found


def render(spans: Sequence[Span], width: int = 120) -> str:
    """The waterfall as plain text of at most `width` columns (80 or more): role, tree, offset, duration, bar."""
    lines = rows(spans)
    if not lines:
        return "no spans"
    origin, end = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    whole = max(1, end - origin)
    times = [(_ms(line.start_ns - origin), _ms(line.total_ns)) for line in lines]
    names = [line.lead + line.title for line in lines]
    role_w = max(4, *(len(line.first.service) for line in lines))
    time_w = max(8, *(len(text) for pair in times for text in pair))
    fixed = role_w + 2 * time_w + 4
    name_w = max(12, min(max(map(len, names)), width - fixed - max(MIN_BAR, width // 3)))
    bar_w = max(1, width - fixed - name_w)
    traces = sorted({span.trace_id for span in spans})
    more = f" and {len(traces) - 1} more" if len(traces) > 1 else ""
    out = [
        _cut(f"trace {traces[0]}{more}   {sum(len(line.spans) for line in lines)} spans   {_ms(whole)} ms", width),
        f"{'role':<{role_w}} {'span':<{name_w}} {'start ms':>{time_w}} {'ms':>{time_w}}",
    ]
    for line, name, (start, total) in zip(lines, names, times, strict=True):
        head = f"{line.first.service:<{role_w}} {_cut(name, name_w):<{name_w}} {start:>{time_w}} {total:>{time_w}}"
        out.append(f"{head} {_bar(line.spans, origin, whole, bar_w)}".rstrip())
    return "\n".join(out)


def as_document(spans: Sequence[Span]) -> dict[str, Any]:
    """The waterfall for programs: the same rows, times in ms since the first span began."""
    origin = min((span.start_ns for span in spans), default=0)
    return {
        "traces": sorted({span.trace_id for span in spans}),
        "start_ns": origin,
        "duration_ms": (max((span.end_ns for span in spans), default=0) - origin) / 1e6,
        "rows": [
            {
                "depth": row.depth,
                "role": row.first.service,
                "workers": sorted({span.worker for span in row.spans}),
                "name": row.first.name,
                "count": len(row.spans),
                "start_ms": (row.start_ns - origin) / 1e6,
                "end_ms": (row.end_ns - origin) / 1e6,
                "total_ms": row.total_ns / 1e6,
                "errors": sum(span.status == "error" for span in row.spans),
                "links": sorted({link for span in row.spans for link in span.links}),
                "attributes": row.first.attributes if len(row.spans) == 1 else {},
            }
            for row in rows(spans)
        ],
    }


def _siblings(children: list[Span], alone: int) -> list[list[Span]]:
    """Children of the same role and name together where there are more than `alone`, in order of the first of each."""
    same: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in children:
        same[span.service, span.name].append(span)
    groups = [group for many in same.values() for group in ([many] if len(many) > alone else [[span] for span in many])]
    return sorted(groups, key=lambda group: (group[0].start_ns, -group[0].end_ns))


def _linked(spans: tuple[Span, ...]) -> str:
    """What the row's links mean: the members of shared work, the others in it, or the trace that asked."""
    links = [link for span in spans for link in span.links]
    if not links:
        return ""
    sizes, tenants = _numbers(spans, *SIZES), _numbers(spans, "tenants")
    of = f", {_range(tenants)} tenants" if tenants and max(tenants) > 1 else ""
    if max(len(span.links) for span in spans) > 1:
        return f" ↗ {len(links)} members{of}"
    if sizes:
        return f" ↗ grouped with {_range([size - 1 for size in sizes])}{of}"
    if tenants:
        return f" ↗ grouped{of}" if of else " ↗ alone in its group"
    return f" ↗ from trace {links[0][0][:8]}"


def _numbers(spans: tuple[Span, ...], *names: str) -> list[int]:
    return [int(value) for span in spans for name in names if isinstance(value := span.attributes.get(name), int | float)]


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"


def _bar(spans: tuple[Span, ...], origin: int, whole: int, width: int) -> str:
    covered = [0.0] * width
    for span in spans:
        low, high = ((t - origin) * width / whole for t in (span.start_ns, span.end_ns))
        first = min(int(low), width - 1)
        for cell in range(first, min(ceil(high), width)):
            covered[cell] += max(0.0, min(high, cell + 1) - max(low, cell))
        covered[first] = max(covered[first], 0.01)  # the shortest span shows
    return "".join(RAMP[min(ceil(share * 4 - 1e-6), 4)] for share in covered)


def _ms(ns: int) -> str:
    ms = ns / 1e6
    return f"{ms:.1f}" if abs(ms) < 100 else f"{ms:,.0f}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
