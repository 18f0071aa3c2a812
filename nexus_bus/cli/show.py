"""Plans, jobs and policies as people read them."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from schemas.plan import JobState, Plan
from schemas.policy import PolicyVersion

STYLES = {"completed": "green", "failed": "red", "cancelled": "yellow", "waiting": "dim", "paused": "yellow"}


def listing(*columns: str, right: Iterable[str] = ()) -> Table:
    """A table without a frame, fit for a terminal and for `grep`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def plan_view(plan: Plan) -> RenderableType:
    """What `nexus plan` prints: who does what, with which sizes, and what it may cost."""
    spec = plan.spec
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows: list[tuple[str, str]] = [
        ("job", f"{plan.tenant}/{spec.name}, {spec.kind}" + (f", priority {spec.priority}" if spec.priority else "")),
        ("phases", " → ".join(plan.phases)),
        ("roles", ", ".join(plan.roles)),
        ("base", f"{spec.base}, tier {spec.tier}"),
    ]
    if spec.lora is not None:
        rows.append(("lora", _brief(spec.lora)))
    if spec.init:
        rows.append(("init", spec.init))
    if spec.head is not None:
        rows.append(
            ("head", f"{spec.head.type}, horizon {spec.head.horizon}, executes {plan.execute}{_options(spec.head.options)}")
        )
    if spec.environment is not None:
        env = spec.environment
        rows.append(("environment", f"{env.id}, task {env.task}, at most {plan.max_steps} steps{_options(env.options)}"))
    if spec.data is not None:
        rows.append(("data", _brief(spec.data)))
    cameras = ", ".join(f"{name} {height}×{width}" for name, (height, width, _) in plan.observation.cameras.items())
    rows += [
        ("sees", f"{cameras or 'no camera'}; state of {plan.observation.state_size}"),
        ("does", f"{plan.action.size} actions in {min(plan.action.low):g} … {max(plan.action.high):g}"),
        ("told", "; ".join(plan.instructions[:4]) + (" …" if len(plan.instructions) > 4 else "")),
    ]
    if spec.algorithm is not None:
        rows.append(("algorithm", _brief(spec.algorithm)))
    if spec.evaluation is not None:
        rows.append(("evaluation", _brief(spec.evaluation)))
    if spec.retention is not None:
        rows.append(("retention", _brief(spec.retention)))
    if spec.budget.wall_s or spec.budget.device_s:
        rows.append(("budget", _brief(spec.budget)))
    if "inference" in plan.roles:
        rows.append(("latency", f"a request waits at most {plan.latency_ms:g} ms for its group to fill"))
    rows += [(f"→ {purpose}", subject) for purpose, subject in plan.subjects.items()]
    rows.append(("estimate", ", ".join(f"{name.replace('_', ' ')} {value:,.10g}" for name, value in plan.estimates.items())))
    for name, value in rows:
        table.add_row(name, Text(value))
    return Group(table, *(Text(f"note: {note}", style="yellow") for note in plan.notes))


def _brief(value: msgspec.Struct) -> str:
    """Fields of a Struct in one line, defaults included, unset ones left out."""
    return ", ".join(f"{key} {_value(item)}" for key, item in msgspec.structs.asdict(value).items() if item is not None)


def _value(item: Any) -> str:
    if isinstance(item, msgspec.Struct):
        return f"({_brief(item)})"
    if isinstance(item, tuple | list):
        return " ".join(map(str, item))
    return f"{item:g}" if isinstance(item, float) else str(item)


def _options(options: dict[str, Any]) -> str:
    return "".join(f", {key} {value}" for key, value in options.items())


def success(state: JobState) -> str:
    """Scores so far, as `before → after`."""
    parts: list[str] = []
    for when in ("before", "after"):
        if (rate := state.scores.get(f"success_{when}")) is not None:
            low, high = state.scores.get(f"low_{when}", 0.0), state.scores.get(f"high_{when}", 1.0)
            parts.append(f"{rate:.2f} [{low:.2f}, {high:.2f}]")
    return " → ".join(parts)


def jobs_table(states: Iterable[JobState]) -> Table:
    """One line per job; those that wait in line say at which place they stand now."""
    from nexus_bus.admission import line

    states = list(states)
    places = {name: place for place, name in enumerate(line(states), 1)}
    table = listing("job", "kind", "phase", "done", "version", "success", "submitted", "reason", right=("done", "version"))
    for state in states:
        spec = state.plan.spec
        done = f"{state.done}/{units(state)}" if state.phase == "training" or "evaluating" in state.phase else ""
        table.add_row(
            spec.name,
            spec.kind,
            Text(state.phase, style=STYLES.get(state.phase, "cyan")),
            done,
            str(state.version) if state.version >= 0 else "",
            success(state),
            state.submitted[:19],
            Text(_reason(state, places.get(spec.name, state.queued))),
        )
    return table


def _reason(state: JobState, place: int) -> str:
    """Why it is where it is. Whoever moved up since it was said has another place, and nobody has said when its turn comes."""
    if place == state.queued:
        return state.reason
    return f"{state.reason.partition('; place ')[0]}; place {place} in the line"


def units(state: JobState) -> int:
    """Units of work of the current phase: episodes of an evaluation, batches or updates of training."""
    if "evaluating" in state.phase:
        return state.plan.spec.evaluation.total if state.plan.spec.evaluation else 0
    return state.plan.batches if state.phase == "training" else 1


def policies_table(versions: Iterable[PolicyVersion]) -> Table:
    """One line per version."""
    table = listing(
        "policy", "parent", "head", "step", "records", "size", "kept", "created", "metrics", right=("step", "records", "size")
    )
    for version in versions:
        metrics = ", ".join(f"{name} {value:.3g}" for name, value in list(version.metrics.items())[:4])
        size = version.weights.size + (version.adapter.size if version.adapter is not None else 0)
        table.add_row(
            version.id,
            version.parent or version.origin,
            f"{version.contract.head.type} T={version.contract.horizon}{' + lora' if version.adapter is not None else ''}",
            str(version.step),
            str(version.records),
            "" if version.retired else f"{size / 1e6:.1f} MB",
            f"retired {version.retired[:10]}" if version.retired else "pinned" if version.pinned else "",
            version.created[:19],
            metrics,
        )
    return table


def lineage_table(versions: Sequence[PolicyVersion]) -> Table:
    """One line per job that a version came through, youngest first; then where an imported one came from."""
    table = listing("policy", "versions", "step", "records", "created", right=("versions", "step", "records"))
    for _, group in itertools.groupby(versions, key=lambda version: version.job):
        run = list(group)
        newest = run[0]
        table.add_row(
            _span([version.id for version in run]), str(len(run)), str(newest.step), str(newest.records), newest.created[:19]
        )
    root = versions[-1]
    elsewhere = [*filter(None, [root.origin]), *root.ancestors]
    for _, names in itertools.groupby(elsewhere, key=lambda policy: policy.rpartition("/")[2].partition("@")[0]):
        run = list(names)
        table.add_row(Text(f"{_span(run)} (elsewhere)", style="dim"), str(len(run)), "", "", "")
    return table


def _span(policies: Sequence[str]) -> str:
    return policies[0] if len(policies) == 1 else f"{policies[0]} … {policies[-1]}"
