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
GROUPED = ("group", "records")  # attributes that count the members of grouped work
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
        """Name, how many, what it was grouped with, and its error."""
        span = self.first
        times = f" ×{len(self.spans)}" if len(self.spans) > 1 else ""
        wrong = [s for s in self.spans if s.status == "error"]
        error = f" ✗ {wrong[0].attributes.get('error', 'error')}" if wrong else ""
        return f"{span.name}{times}{_linked(self.spans)}{error}"

    @property
    def start_ns(self) -> int:
        """When the first began."""
        return self.first.start_ns

    @property
    def total_ns(self) -> int:
        """Time of all of them together."""
        return sum(span.end_ns - span.start_ns for span in self.spans)


def rows(spans: Iterable[Span]) -> list[Row]:
    """The tree in reading order. Spans whose parent is not among them are roots; a span given twice counts once."""
    known = {span.span_id: span for span in spans}
    below: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(known.values(), key=lambda s: (s.start_ns, -s.end_ns, s.span_id)):
        below[span.parent_id if span.parent_id in known else ""].append(span)
    found: list[Row] = []

    def walk(children: list[Span], depth: int, stem: str, merged: bool) -> None:
        groups = _siblings(children, 1 if merged else ALONE)
        for number, group in enumerate(groups):
            last = number == len(groups) - 1
            lead = "" if depth == 0 else stem + ("└ " if last else "├ ")
            found.append(Row(depth, lead, tuple(group)))
            inner = [child for span in group for child in below[span.span_id]]
            walk(inner, depth + 1, "" if depth == 0 else stem + ("  " if last else "│ "), merged or len(group) > 1)

    walk(below[""], 0, "", merged=False)
    return found


def render(spans: Sequence[Span], width: int = 120) -> str:
    """The waterfall as plain text of at most `width` columns (80 or more): role, tree, offset, duration, bar."""
    lines = rows(spans)
    if not lines:
        return "no spans"
    origin, end = min(s.start_ns for s in spans), max(s.end_ns for s in spans)
    whole = max(1, end - origin)
    role_width = max(4, *(len(line.first.service) for line in lines))
    names = [line.lead + line.title for line in lines]
    times = [(_ms(line.start_ns - origin), _ms(line.total_ns)) for line in lines]
    time_width = max(8, *(len(text) for pair in times for text in pair))
    fixed = role_width + 2 * time_width + 4
    name_width = max(12, min(max(map(len, names)), width - fixed - max(MIN_BAR, width // 3)))
    bar_width = max(1, width - fixed - name_width)
    traces = sorted({span.trace_id for span in spans})
    more = f" and {len(traces) - 1} more" if len(traces) > 1 else ""
    out = [
        _cut(f"trace {traces[0]}{more}   {len({s.span_id for s in spans})} spans   {_ms(whole)} ms", width),
        f"{'role':<{role_width}} {'span':<{name_width}} {'start ms':>{time_width}} {'ms':>{time_width}} ".rstrip(),
    ]
    for line, name, (start, total) in zip(lines, names, times, strict=True):
        head = f"{line.first.service:<{role_width}} {_cut(name, name_width):<{name_width}} {start:>{time_width}} {total:>{time_width}}"
        out.append(f"{head} {_bar(line.spans, origin, whole, bar_width)}".rstrip())
    return "\n".join(out)


def as_document(spans: Sequence[Span]) -> dict[str, Any]:
    """The waterfall for programs: the same rows, times in ms since the first span began."""
    lines = rows(spans)
    origin = min((span.start_ns for span in spans), default=0)
    return {
        "traces": sorted({span.trace_id for span in spans}),
        "start_ns": origin,
        "duration_ms": (max((span.end_ns for span in spans), default=0) - origin) / 1e6,
        "rows": [
            {
                "depth": line.depth,
                "role": line.first.service,
                "workers": sorted({span.worker for span in line.spans}),
                "name": line.first.name,
                "count": len(line.spans),
                "start_ms": (line.start_ns - origin) / 1e6,
                "end_ms": (max(span.end_ns for span in line.spans) - origin) / 1e6,
                "total_ms": line.total_ns / 1e6,
                "errors": sum(span.status == "error" for span in line.spans),
                "links": sorted({tuple(link) for span in line.spans for link in span.links}),
                "attributes": line.first.attributes if len(line.spans) == 1 else {},
            }
            for line in lines
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
    """What the row's links mean: work shared with others, the members of such work, or where a trace came from."""
    links = [link for span in spans for link in span.links]
    if not links:
        return ""
    sizes = [int(value) for span in spans for key in GROUPED if isinstance(value := span.attributes.get(key), int | float)]
    tenants = [int(value) for span in spans if isinstance(value := span.attributes.get("tenants"), int | float)]
    of = f" of {_span_of(tenants)} tenants" if tenants and max(tenants) > 1 else ""
    if max(len(span.links) for span in spans) > 1:
        return f" ↗ {len(links)} members{of}"
    if sizes:
        return f" ↗ grouped with {_span_of([size - 1 for size in sizes])}{of}"
    if tenants:
        return f" ↗ grouped{of}" if of else " ↗ grouped alone"
    return f" ↗ from trace {links[0][0][:8]}"


def _span_of(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"  # noqa: RUF001 - an en dash between two numbers


def _bar(spans: tuple[Span, ...], origin: int, whole: int, width: int) -> str:
    covered = [0.0] * width
    for span in spans:
        low, high = ((t - origin) * width / whole for t in (span.start_ns, span.end_ns))
        for cell in range(min(int(low), width - 1), min(ceil(high), width)):
            covered[cell] += max(0.0, min(high, cell + 1) - max(low, cell))
        covered[min(int(low), width - 1)] += 1e-9  # the shortest span shows
    return "".join(
        RAMP[min(len(RAMP) - 1, ceil(share * (len(RAMP) - 1) - 1e-6) or (1 if share else 0))] for share in covered
    ).rstrip()


def _ms(ns: int) -> str:
    ms = ns / 1e6
    return f"{ms:.1f}" if abs(ms) < 100 else f"{ms:,.0f}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
