"""A report as one page that needs nothing else: numbers, charts, films. All that comes from messages is escaped."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from nexus_bus.evaluation.charts import POOLED, solved_curve, success_bars, time_split
from nexus_bus.evaluation.style import STYLE
from nexus_bus.evaluation.summary import of
from schemas.evaluation import Comparison, Evaluated, EvaluationEpisode, EvaluationFilm, Manifest

EPISODES = 2000  # rows of the table at most; the file beside the page has all

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"


def page(manifest: Manifest, episodes: Sequence[EvaluationEpisode], films: Mapping[str, EvaluationFilm]) -> str:
    """The page. `episodes` as `summary.once` gives them; `films` by the names in their records."""
    found = manifest.evaluations
    policies = " → ".join(one.policy for one in found)
    protocol = manifest.protocol
    tasks = f"{len(protocol.tasks)} tasks" if len(protocol.tasks) > 1 else "".join(protocol.tasks)
    hero = "half" if len(found) == 1 else "third"
    blocks = [
        *(_hero(one, number, len(found), hero) for number, one in enumerate(found)),
        *([_change(manifest.change, hero)] if manifest.change is not None else []),
        *([_time(found)] if len(found) == 1 else []),
        _card("Success, with 95 % intervals (Wilson)", success_bars(found) + _pooled(found), "half"),
        _card("Solved within so many steps", solved_curve([of(episodes, one.purpose) for one in found]), "half"),
        *_shown(manifest, episodes, films),
        _card("By task", _table(found)),
        *([_time(found, "wide")] if len(found) > 1 else []),
        _card("Protocol", _protocol(manifest), "half"),
        _card("What was evaluated", _made_of(found), "half"),
        _card("Episodes", _episodes(episodes)),
    ]
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in manifest.notes)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>{escape(policies)}: evaluation</title>
<style>{STYLE}</style></head><body><main>
<h1>{escape(policies)}</h1>
<p class="sub">{escape(protocol.environment)}, {escape(tasks)} · {protocol.trials} trials of each, seed {protocol.seed}
· success at {"any step" if protocol.success == "any_step" else "the last step"}
· job {escape(manifest.tenant)}/{escape(manifest.job)}, {escape(manifest.created[:16].replace("T", " "))} UTC</p>
{notes}<div class="grid">{"".join(blocks)}</div>
<footer>By <code>nexus report {escape(manifest.job)}</code>; for programs: manifest.json and episodes.jsonl.</footer>
</main></body></html>
"""


def _card(title: str, content: str, size: str = "wide") -> str:
    return f'<section class="card {size}"><h2>{escape(title)}</h2>{content}</section>'


def _hero(one: Evaluated, number: int, count: int, size: str) -> str:
    summary = one.overall
    title = one.policy if count == 1 else f"{one.policy}, {one.purpose} training"
    others = sorted((end, times) for end, times in summary.ends.items() if end != "success")
    facts = _facts(
        ("solved", f"{summary.successes} of {summary.episodes}"),
        ("mean return", f"{summary.mean_return:.3g}"),
        ("mean length", f"{summary.mean_length:.1f} steps"),
        *((f"ended by {end.replace('_', ' ')}", str(times)) for end, times in others),
    )
    rate = f"{summary.success * 100:.1f} %"
    pooled = f", {len(one.tasks)} tasks pooled" if len(one.tasks) > 1 else ""
    interval = f"95 % interval {summary.low * 100:.1f} – {summary.high * 100:.1f}{pooled}"
    return (
        f'<section class="card {size}"><h2><span class="k k{number}"></span>{escape(title)}</h2>'
        f'<div class="hero">{rate}</div><div class="interval">{interval}</div>{facts}</section>'
    )


def _time(found: Sequence[Evaluated], size: str = "half") -> str:
    return _card("Mean time of an episode", time_split(found) + _legend(), size)


def _pooled(found: Sequence[Evaluated]) -> str:
    if all(len(one.tasks) < 2 for one in found):
        return ""
    return f'<p class="interval">{escape(POOLED)}: one interval over all episodes, as if they were of one task.</p>'


def _facts(*facts: tuple[str, str]) -> str:
    return f'<div class="facts">{"".join(f"<span>{escape(name)} <b>{escape(value)}</b></span>" for name, value in facts)}</div>'


def _change(change: Comparison, size: str) -> str:
    facts = _facts(
        ("McNemar, mid-p", f"{change.p_value:.2g}"),
        ("return", f"{change.return_difference:+.3g} ({change.return_low:+.3g} … {change.return_high:+.3g})"),
        ("only before", str(change.only_a)), ("only after", str(change.only_b)),
        ("both", str(change.both)), ("neither", str(change.neither)),
    )  # fmt: skip
    interval = f"95 % interval {change.low * 100:+.1f} … {change.high * 100:+.1f} points, paired by trial"
    return (
        f'<section class="card {size}"><h2>Change</h2><div class="hero">{change.difference * 100:+.1f}</div>'
        f'<div class="interval">{interval}</div>{facts}</section>'
    )


def _legend() -> str:
    kinds = (("simulate", "simulator"), ("forward", "its share of forwards"))
    keys = "".join(f'<span><span class="k t-{kind}"></span>{text}</span>' for kind, text in kinds)
    waiting = "Waiting is for queues, for groups to fill and for the turns of others: it says how busy the service was."
    return f'<div class="facts">{keys}</div><p class="interval">{waiting}</p>'


def _shown(manifest: Manifest, episodes: Sequence[EvaluationEpisode], films: Mapping[str, EvaluationFilm]) -> Iterable[str]:
    filmed = [one for one in episodes if one.film in films]
    every = manifest.protocol.execute or 1
    what = (
        f"What the policy saw: one picture per decision, of {every} step{'s' * (every > 1)} each. "
        "Long films are thinned, and large pictures made smaller."
    )
    for title, success in (("First failures", False), ("First successes", True)):
        figures = "".join(_figure(one, films[one.film]) for one in filmed if one.success is success)
        if figures:
            yield _card(title, f'<p class="interval">{what}</p><div class="films">{figures}</div>')


def _figure(episode: EvaluationEpisode, film: EvaluationFilm) -> str:
    source = f"data:{film.media_type};base64,{base64.b64encode(film.data).decode()}"
    shown = (
        f'<video src="{source}" controls loop muted autoplay playsinline></video>'
        if film.media_type == "video/mp4"
        else f'<img src="{source}" alt="">'
    )
    said = f"{escape(episode.task)}, trial {episode.trial}, seed {episode.seed} ({escape(episode.policy)})"
    told = f"<q>{escape(film.instruction)}</q><br>" if film.instruction else ""
    end = f"{_outcome(episode)} after {episode.length} steps"
    return f"<figure>{shown}<figcaption>{told}{said}<br>{end}</figcaption></figure>"


def _outcome(episode: EvaluationEpisode) -> str:
    return f'<span class="{"good" if episode.success else "bad"}">{escape(episode.end.replace("_", " "))}</span>'


def _rows(head: Sequence[str], rows: Iterable[Sequence[object]], numeric: Sequence[str]) -> str:
    """A table; cells that begin with a tag are taken as they are."""
    aligned = [' class="n"' if name in numeric else "" for name in head]
    top = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(head, aligned, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, aligned, strict=True)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _table(found: Sequence[Evaluated]) -> str:
    head = ("policy", "task", "solved", "success", "95 % interval", "return", "length", "simulate s", "forward s", "wait s")
    rows: list[Sequence[object]] = []
    for one in found:
        for task, summary in {**one.tasks, **({POOLED: one.overall} if len(one.tasks) > 1 else {})}.items():
            each = max(1, summary.episodes)
            rows.append((
                escape(one.policy), escape(task), f"{summary.successes}/{summary.episodes}", f"{summary.success:.1%}",
                f"{summary.low:.1%} – {summary.high:.1%}", f"{summary.mean_return:.3g}", f"{summary.mean_length:.1f}",
                f"{summary.simulate_s / each:.2f}", f"{summary.forward_s / each:.3f}", f"{summary.wait_s / each:.2f}",
            ))  # fmt: skip
    return _rows(head, rows, head[2:])


def _protocol(manifest: Manifest) -> str:
    protocol = manifest.protocol
    given: dict[str, Any] = {name: getattr(protocol, name) for name in protocol.__struct_fields__}
    rows = [
        (escape(name.replace("_", " ")), escape(_said(value))) for name, value in given.items() if value not in (None, "", {})
    ]
    return _rows(("what", "is"), rows, ())


def _made_of(found: Sequence[Evaluated]) -> str:
    rows: list[tuple[str, str]] = []
    for one in found:
        rows.append(("policy", escape(one.policy)))
        if (version := one.version) is not None:
            made = {
                "weights": version.weights, "adapter": version.adapter or "none", "backbone": version.backbone,
                "backbone fingerprint": version.backbone_fingerprint, "contract": version.contract,
                "statistics": version.statistics, "published": f"{version.created[:19]}, step {version.step}",
            }  # fmt: skip
            rows += [(name, f'<span class="hash">{escape(value)}</span>') for name, value in made.items()]
        rows.append(("service", escape(", ".join(one.services) or "unknown")))
    return _rows(("what", "is"), rows, ())


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _episodes(episodes: Sequence[EvaluationEpisode]) -> str:
    head = ("policy", "task", "trial", "seed", "attempts", "end", "return", "length", "simulate s", "forward s", "wait s")
    rows = [
        (
            escape(one.policy), escape(one.task), one.trial, one.seed, one.attempts, _outcome(one), f"{one.episode_return:.3g}",
            one.length, f"{one.simulate_s:.2f}", f"{one.forward_s:.3f}", f"{one.wait_s:.2f}",
        )
        for one in episodes[:EPISODES]
    ]  # fmt: skip
    more = f"<p>… and {len(episodes) - EPISODES} more, in episodes.jsonl</p>" if len(episodes) > EPISODES else ""
    numeric = [name for name in head if name not in ("policy", "task", "end")]
    return f"<details><summary>{len(episodes)} episodes</summary>{_rows(head, rows, numeric)}{more}</details>"
