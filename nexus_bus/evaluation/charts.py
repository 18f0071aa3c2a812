"""Charts of a report, as SVG without a library: success with its intervals, how soon episodes were solved, where time went.

Colours are classes of the page's style sheet: a series is `s0` or `s1`.
"""

from collections.abc import Sequence
from html import escape

from schemas.evaluation import Evaluated, EvaluationEpisode, Summary

WIDTH = 500
LEFT, RIGHT = 110, 56  # room for names, and for numbers
ROW, DOT = 30, 5
WAITING = 130  # more room for the numbers beside a bar of times
POOLED = "all, pooled"


def success_bars(evaluations: Sequence[Evaluated]) -> str:
    """Success of each task with its 95 % interval, a row per task and evaluation, after one for all of them pooled."""
    tasks = list(dict.fromkeys(task for one in evaluations for task in one.tasks))
    rows: list[tuple[str, list[Summary | None]]] = [(POOLED if len(tasks) > 1 else tasks[0], [e.overall for e in evaluations])]
    if len(tasks) > 1:
        rows += [(task, [one.tasks.get(task) for one in evaluations]) for task in tasks]
    each = ROW if len(evaluations) == 1 else ROW + 14
    height = each * len(rows) + 34
    parts = [_x_axis(height, [0, 0.25, 0.5, 0.75, 1], [f"{tick} %" for tick in (0, 25, 50, 75, 100)])]
    for number, (name, summaries) in enumerate(rows):
        top = 10 + each * number
        weight = ' class="strong"' if number == 0 and len(rows) > 1 else ""
        parts.append(
            f'<text x="{LEFT - 12}" y="{top + each / 2 + 4:.0f}" text-anchor="end"{weight}>{escape(_short(name))}</text>'
        )
        for series, summary in enumerate(summaries):
            if summary is not None:
                y = top + each * (series + 1) / (len(summaries) + 1)
                parts.append(_whisker(summary, y, series))
    return _svg(height, parts, "Success by task, with 95 % intervals")


def _whisker(summary: Summary, y: float, series: int) -> str:
    low, high, at = _x(summary.low), _x(summary.high), _x(summary.success)
    return (
        f'<g class="s{series}"><line x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}" class="range"/>'
        f'<circle cx="{at:.1f}" cy="{y:.1f}" r="{DOT}"/></g>'
        f'<text x="{WIDTH - RIGHT + 10}" y="{y + 4:.1f}" class="num">{summary.successes}/{summary.episodes}</text>'
    )


def solved_curve(series: Sequence[Sequence[EvaluationEpisode]]) -> str:
    """Which share of the episodes was solved within so many steps; one curve for each evaluation."""
    longest = max(max((one.length for one in episodes), default=1) for episodes in series) or 1
    height, bottom = 240, 204
    parts = [_x_axis(height, [0, 0.25, 0.5, 0.75, 1], [f"{longest * share:.0f}" for share in (0, 0.25, 0.5, 0.75, 1)])]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = bottom - share * (bottom - 10)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 12}" y="{y + 4:.1f}" text-anchor="end" class="num">{share * 100:.0f} %</text>')
    for number, episodes in enumerate(series):
        lengths = sorted(one.length for one in episodes if one.success)
        path, y = f"M{LEFT} {bottom}", float(bottom)
        for solved, length in enumerate(lengths, 1):
            x = _x(length / longest)
            path += f"H{x:.1f}"
            y = bottom - solved / len(episodes) * (bottom - 10)
            path += f"V{y:.1f}"
        path += f"H{WIDTH - RIGHT}"
        parts.append(f'<path d="{path}" class="curve s{number}"/>')
        share = len(lengths) / len(episodes)
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{y + 4:.1f}" class="num s{number}">{share:.0%}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 2}" text-anchor="middle" class="axis">steps</text>')
    return _svg(height + 4, parts, "Share of episodes solved within so many steps")


def time_split(evaluations: Sequence[Evaluated]) -> str:
    """Mean seconds that simulator and model worked for an episode. Waiting is a number beside: it is the service's."""
    worked = [
        [seconds / max(1, one.overall.episodes) for seconds in (one.overall.simulate_s, one.overall.forward_s)]
        for one in evaluations
    ]
    longest = max(map(sum, worked)) or 1.0
    room = WIDTH - LEFT - RIGHT - WAITING
    parts: list[str] = []
    for number, (one, each) in enumerate(zip(evaluations, worked, strict=True)):
        y, x = 8 + ROW * number, float(LEFT)
        parts.append(f'<text x="{LEFT - 12}" y="{y + 16}" class="name">{escape(_short(one.policy))}</text>')
        for kind, seconds in zip(("simulate", "forward"), each, strict=True):
            width = room * seconds / longest
            title = f"<title>{kind} {seconds:.2f} s</title>"
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="20" class="t-{kind}">{title}</rect>')
            x += width
        waited = one.overall.wait_s / max(1, one.overall.episodes)
        parts.append(f'<text x="{x + 8:.1f}" y="{y + 15}" class="num">{sum(each):.2f} s, and {waited:.2f} s waiting</text>')
    return _svg(ROW * len(evaluations) + 8, parts, "Mean time of an episode, without waiting")


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _x_axis(height: int, at: Sequence[float], labels: Sequence[str]) -> str:
    lines = "".join(
        f'<line x1="{_x(share):.1f}" x2="{_x(share):.1f}" y1="10" y2="{height - 34}" class="grid"/>'
        f'<text x="{_x(share):.1f}" y="{height - 18}" text-anchor="middle" class="num">{escape(label)}</text>'
        for share, label in zip(at, labels, strict=True)
    )
    return f"<g>{lines}</g>"


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}…"


def _svg(height: int, parts: Sequence[str], title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
