"""Reports and comparisons as people read them in a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nexus_bus.cli.show import listing
from schemas.evaluation import Comparison, Manifest


def report_view(manifest: Manifest) -> RenderableType:
    """One line per policy and task, then what a reader has to know."""
    numbers = ("solved", "success", "95 %", "return", "length", "simulate s", "forward s", "wait s")
    table = listing("policy", "task", *numbers, right=numbers)
    for one in manifest.evaluations:
        rows = {**one.tasks, **({"all, pooled": one.overall} if len(one.tasks) > 1 else {})}
        for task, summary in rows.items():
            each = max(1, summary.episodes)
            table.add_row(
                one.policy,
                task,
                f"{summary.successes}/{summary.episodes}",
                f"{summary.success:.3f}",
                f"{summary.low:.3f} – {summary.high:.3f}",
                f"{summary.mean_return:.3g}",
                f"{summary.mean_length:.1f}",
                f"{summary.simulate_s / each:.2f}",
                f"{summary.forward_s / each:.3f}",
                f"{summary.wait_s / each:.2f}",
            )
    notes = [Text(f"note: {note}", style="dim") for note in manifest.notes]
    change = [Text(), comparison_view(manifest.change)] if manifest.change is not None else []
    return Group(table, *change, *notes)


def comparison_view(found: Comparison) -> RenderableType:
    """Both rates, their difference with its interval, and the table of pairs."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    unpaired = f"; {found.unpaired} episodes are unpaired" if found.unpaired else ""
    solved = f"both {found.both}, only A {found.only_a}, only B {found.only_b}, neither {found.neither}"
    rows = [
        ("A", f"{found.a}: {found.success_a:.3f}"),
        ("B", f"{found.b}: {found.success_b:.3f}"),
        ("difference", f"{found.difference:+.3f}, 95 % {found.low:+.3f} … {found.high:+.3f} (Newcombe, {found.pairs} pairs)"),
        ("solved", f"{solved}; McNemar mid-p {found.p_value:.3g}"),
        ("return", f"{found.return_difference:+.3g}, 95 % {found.return_low:+.3g} … {found.return_high:+.3g} (bootstrap)"),
        (
            "identical",
            f"{found.identical} of {found.pairs} pairs{unpaired}",
        ),
    ]
    rows += [(f"  {task}", f"{by:+.3f}, 95 % {low:+.3f} … {high:+.3f}") for task, (by, low, high) in found.tasks.items()]
    for name, value in rows:
        table.add_row(name, Text(value))
    return table
