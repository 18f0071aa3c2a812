"""What the demo leaves: one result per tenant, as a table, as `summary.json` and as a picture of the curves."""

from pathlib import Path
from typing import Literal

import msgspec
from rich.table import Table

from nexus_bus.client import Client
from nexus_bus.ledger import Ledger
from nexus_bus.registry import state_key
from schemas.plan import JobState
from schemas.policy import TrainingState

Number = float | None


class Success(msgspec.Struct, kw_only=True):
    """A success rate with its Wilson 95 % interval."""

    rate: float
    low: float
    high: float
    episodes: int

    def __str__(self) -> str:
        return f"{self.rate:.2f} [{self.low:.2f}, {self.high:.2f}]"


class TenantResult(msgspec.Struct, kw_only=True):
    """One tenant's workload and what came of it."""

    name: str
    kind: Literal["sft", "rl"]
    task: str
    head: str
    success_before: Success
    success_after: Success
    policy_versions: int
    records_learned: int
    mean_lag: float  # policy versions
    mean_group_size: float  # samples in the grouped forwards that answered this tenant's requests
    device_s: float

    @property
    def verdict(self) -> str:
        """Whether success rose, said as plainly as the intervals allow."""
        if self.success_after.low > self.success_before.high:
            return "rose clearly"
        if self.success_after.rate > self.success_before.rate:
            return "rose, intervals overlap"
        return "did not rise"


class Summary(msgspec.Struct, kw_only=True):
    """`runs/demo/summary.json`."""

    tenants: list[TenantResult]
    seconds: float
    seed: int
    environment: str
    rates: dict[str, float]


async def collect(client: Client, job: JobState) -> TenantResult:
    """Put one job's result together from the registry and the usage stream."""
    spec, scores = job.plan.spec, job.scores
    entry = await client.bus.kv("registry").get(state_key(job.plan.tenant, spec.name), TrainingState)
    trained = entry.value if entry is not None else None
    ledger = Ledger(("kind",))
    async for item in client.bus.tail("usage", since="all", follow=False, tenant=job.plan.tenant, job=spec.name):
        ledger.take(item.message)
    used = {row["kind"]: row for row in ledger.rows()}
    requests = used["inference"]["requests"] if "inference" in used else 0
    return TenantResult(
        name=job.plan.tenant,
        kind="rl" if spec.kind == "rl" else "sft",
        task=f"{spec.environment.id}: {', '.join(job.plan.instructions[:2])}" if spec.environment else "",
        head=f"{spec.head.type} T={spec.head.horizon}" if spec.head else "",
        success_before=_success(scores, "before"),
        success_after=_success(scores, "after"),
        policy_versions=job.version + 1,
        records_learned=trained.records if trained else 0,
        mean_lag=trained.lag_sum / trained.records if trained and trained.records else 0.0,
        mean_group_size=used["inference"]["group_sum"] / requests if requests else 0.0,
        device_s=sum(used[kind]["device_s"] for kind in ("inference", "training") if kind in used),
    )


def _success(scores: dict[str, float], when: str) -> Success:
    return Success(
        rate=scores.get(f"success_{when}", 0.0),
        low=scores.get(f"low_{when}", 0.0),
        high=scores.get(f"high_{when}", 1.0),
        episodes=int(scores.get(f"episodes_{when}", 0)),
    )


def table(results: list[TenantResult]) -> Table:
    """The closing table."""
    view = Table(title="Success before → after, Wilson 95 % intervals", title_justify="left")
    for column in ("tenant", "workload", "before → after", "verdict"):
        view.add_column(column)
    for column in ("versions", "records", "lag", "group", "device s"):
        view.add_column(column, justify="right")
    for result in results:
        view.add_row(
            result.name,
            f"{result.kind} · {result.head} · {result.task}",
            f"{result.success_before} → {result.success_after}",
            result.verdict,
            str(result.policy_versions),
            str(result.records_learned),
            f"{result.mean_lag:.2f}",
            f"{result.mean_group_size:.1f}",
            f"{result.device_s:.1f}",
        )
    return view


Curve = list[tuple[float, float]]  # (seconds since the start, value)


def draw(path: Path, losses: dict[str, Curve], successes: dict[str, Curve], results: list[TenantResult]) -> None:
    """A picture for those who would rather look: loss of the SFT job, training success of the RL jobs, before against after."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for name, curve in losses.items():
        left.plot(*zip(*curve, strict=True), label=name)
    left.set(title="SFT: loss", xlabel="seconds", yscale="log")
    for name, curve in successes.items():
        middle.plot(*zip(*curve, strict=True), marker="o", markersize=3, label=name)
    middle.set(title="RL: success of the episodes learned from", xlabel="seconds", ylim=(0, 1))
    for axis in (left, middle):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    for row, result in enumerate(results):
        for offset, colour, score in ((-0.12, "tab:gray", result.success_before), (0.12, "tab:blue", result.success_after)):
            right.plot([score.low, score.high], [row + offset] * 2, color=colour, linewidth=2)
            right.plot([score.rate], [row + offset], "o", color=colour)
    right.set(title="evaluation: before (grey), after (blue)", xlim=(0, 1), yticks=range(len(results)))
    right.set_yticklabels([f"{result.name}\n{result.kind} · {result.head}" for result in results])
    right.invert_yaxis()
    figure.savefig(path, dpi=110)
    plt.close(figure)
