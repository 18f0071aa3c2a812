"""A trace as text: every span has its place, repetition is gathered, and the picture fits the terminal."""

import msgspec
import pytest

from nexus_bus.waterfall import as_document, render, rows
from schemas.control import Span

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
OTHER = "ab" * 16


class Trace:
    """Spans of one trace, in milliseconds since it began."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def span(self, name: str, start: float, end: float, parent: str = "", **given: object) -> str:
        span_id = f"{len(self.spans) + 1:016x}"
        fields: dict[str, object] = {"service": name.partition(".")[0], "worker": "w-0"} | given
        self.spans.append(
            Span(
                trace_id=TRACE,
                span_id=span_id,
                parent_id=parent,
                name=name,
                start_ns=10**18 + int(start * 1e6),
                end_ns=10**18 + int(end * 1e6),
                **fields,  # type: ignore[arg-type]
            )
        )
        return span_id


@pytest.fixture
def episode() -> list[Span]:
    trace = Trace()
    root = trace.span("rollout.episode", 0, 300, links=[(OTHER, "1" * 16)])
    trace.span("environment.reset", 0, 10, root)
    for i in range(9):
        asked = trace.span("inference.request", 10 + 30 * i, 25 + 30 * i, root)
        trace.span(
            "inference.forward", 12 + 30 * i, 24 + 30 * i, asked,
            links=[(OTHER, f"{i + 1:016x}")], attributes={"group": 5 + i % 3, "tenants": 3},
        )  # fmt: skip
        trace.span("environment.step", 25 + 30 * i, 39 + 30 * i, root)
    published = trace.span("record.publish", 290, 295, root)
    trace.span("training.queue", 295, 600, published)
    trace.span("training.step", 600, 700, published, status="error", attributes={"error": "loss is not finite"})
    return trace.spans


def test_children_stand_below_their_parent_in_order_of_time(episode: list[Span]) -> None:
    assert [(row.depth, row.first.name, len(row.spans)) for row in rows(episode)] == [
        (0, "rollout.episode", 1),
        (1, "environment.reset", 1),
        (1, "inference.request", 9),
        (2, "inference.forward", 9),
        (1, "environment.step", 9),
        (1, "record.publish", 1),
        (2, "training.queue", 1),
        (2, "training.step", 1),
    ]


def test_repeated_siblings_are_one_row_that_says_how_many_and_with_whom(episode: list[Span]) -> None:
    text = render(episode, 160)
    assert "environment.step ×9" in text
    assert "inference.forward ×9 ↗ grouped with 4–6, 3 tenants" in text


def test_two_siblings_stay_rows_of_their_own() -> None:
    trace = Trace()
    root = trace.span("a.root", 0, 10)
    trace.span("a.half", 0, 5, root)
    trace.span("a.half", 5, 10, root)
    assert [len(row.spans) for row in rows(trace.spans)] == [1, 1, 1]


def test_an_error_and_the_origin_of_a_trace_are_shown(episode: list[Span]) -> None:
    text = render(episode, 160)
    assert "training.step ✗ loss is not finite" in text
    assert f"rollout.episode ↗ from trace {OTHER[:8]}" in text


def test_a_group_shows_its_members() -> None:
    trace = Trace()
    links = [(OTHER, f"{i + 1:016x}") for i in range(7)]
    trace.span("inference.group", 0, 10, links=links, attributes={"group": 7, "tenants": 2})
    assert "inference.group ↗ 7 members, 2 tenants" in render(trace.spans)


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_it_fits_the_width(episode: list[Span], width: int) -> None:
    assert max(map(len, render(episode, width).splitlines())) <= width


def test_bars_show_when(episode: list[Span]) -> None:
    lines = render(episode, 120).splitlines()
    queue = next(line for line in lines if "training.queue" in line)
    step = next(line for line in lines if "training.step" in line)
    assert queue.index("█") < step.index("█")
    assert len(queue.rstrip()) <= len(step.rstrip())


def test_a_span_whose_parent_is_elsewhere_is_a_root_and_one_given_twice_counts_once() -> None:
    trace = Trace()
    trace.span("a.orphan", 0, 1, "f" * 16)
    assert [row.depth for row in rows(trace.spans * 2)] == [0]


def test_no_spans_and_no_time_are_no_error() -> None:
    trace = Trace()
    trace.span("a.instant", 5, 5)
    assert render([]) == "no spans"
    assert "a.instant" in render(trace.spans)
    assert as_document([])["rows"] == []


def test_programs_get_the_same_rows(episode: list[Span]) -> None:
    document = msgspec.json.decode(msgspec.json.encode(as_document(episode)))
    steps = next(row for row in document["rows"] if row["name"] == "environment.step")
    assert steps["count"] == 9
    assert steps["start_ms"] == 25
    assert steps["total_ms"] == pytest.approx(9 * 14)
    assert document["duration_ms"] == 700
