"""Alerts and dashboard ask for numbers that `nexus metrics` exports, and the runbook has an answer to each alert."""

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import yaml

from nexus_bus.cli import COMMANDS
from nexus_bus.metrics import COMPUTED, CONSUMERS, KEPT, METRICS, STATES, STREAMS
from schemas.control import Role
from schemas.plan import Phase
from tests.unit.ops.manifests import KUBERNETES, OPS, ROOT, validate

RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((OPS / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
DASHBOARD: dict[str, Any] = json.loads((OPS / "dashboard.json").read_text())
VALUES = {
    "role": {*get_args(Role), "other"},  # other: a tenant's own environments
    "state": set(STATES),
    "phase": set(get_args(Phase)),
    "queue": set(STREAMS),
    "stream": set(KEPT),
    "kind": set(COMPUTED),
    "use": {"jobs", "idle", "loading", "canary", "repeated"},
}
METRIC = r"(nexus_\w+)"
HEADING = re.compile(r"^### (Nexus\w+)$", re.MULTILINE)
WORDS = re.compile(r"`nexus ([a-z]+)|^nexus ([a-z]+)|run --rm(?: -T)? operator ([a-z]+)", re.MULTILINE)


def targets() -> Iterator[tuple[str, str, str]]:
    """(panel, expression, legend)."""
    for panel in DASHBOARD["panels"]:
        yield from ((panel["title"], target["expr"], target["legendFormat"]) for target in panel["targets"])


EXPRESSIONS = [(rule["alert"], rule["expr"]) for rule in RULES] + [(title, expr) for title, expr, _ in targets()]


def labels_of(expression: str) -> set[str]:
    """Those that its result has: of the last `by`, else of its first number."""
    if groups := re.findall(r"by \(([^)]*)\)", expression):
        return set(groups[-1].split(", "))
    (first, *_) = re.findall(METRIC, expression)
    return set(METRICS[first][1])


@pytest.mark.parametrize(("name", "expression"), EXPRESSIONS, ids=[name for name, _ in EXPRESSIONS])
def test_every_number_is_exported_with_the_labels_that_it_is_asked_by(name: str, expression: str) -> None:
    used = re.findall(METRIC, expression)
    assert used
    assert set(used) <= METRICS.keys()
    for metric, selector in re.findall(METRIC + r"\{([^}]*)\}", expression):
        for part in selector.split(", "):
            label, _, value = re.fullmatch(r'(\w+)(=|!=|=~|!~)"([^"]+)"', part).groups()  # type: ignore[union-attr]
            assert label in METRICS[metric][1]
            assert set(value.split("|")) <= VALUES[label]
    grouped = re.findall(r"by \(([^)]*)\) \((?:\w+\()?" + METRIC, expression)
    assert len(grouped) == expression.count("by (")
    for labels, metric in grouped:
        assert set(labels.split(", ")) <= set(METRICS[metric][1])


def test_labels_take_the_values_that_the_test_knows() -> None:
    assert {label for _, labels in METRICS.values() for label in labels} == VALUES.keys()
    assert {role for _, role in CONSUMERS.values()} < VALUES["role"]


def test_words_of_alerts_and_legends_name_labels_that_are_there() -> None:
    for rule in RULES:
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert named <= labels_of(rule["expr"])
    for _, expression, legend in targets():
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels_of(expression)


def test_every_alert_says_how_urgent_it_is_and_has_its_section_in_the_runbook() -> None:
    assert len(RULES) >= 12
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    assert {rule["labels"]["severity"] for rule in RULES} == {"critical", "warning"}
    assert HEADING.findall((OPS / "RUNBOOK.md").read_text()) == names


def test_the_rules_become_an_object_of_the_prometheus_operator_as_the_readme_says() -> None:
    block = re.search(r"```bash\n(\{ printf.*?)```", (KUBERNETES / "README.md").read_text(), re.DOTALL)
    assert block
    command, sent = block[1].rsplit("|", 1)
    assert sent.split() == ["kubectl", "apply", "-f", "-"]
    made = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rule = yaml.safe_load(made)
    validate(rule)
    assert [one["alert"] for group in rule["spec"]["groups"] for one in group["rules"]] == [one["alert"] for one in RULES]


def test_panels_have_names_of_their_own_and_do_not_lie_on_each_other() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for at in (panel["gridPos"] for panel in panels):
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells
    (choice,) = DASHBOARD["templating"]["list"]
    for panel in panels:
        assert {one["datasource"]["uid"] for one in (panel, *panel["targets"])} == {f"${{{choice['name']}}}"}


@pytest.mark.parametrize("path", ["RUNBOOK.md", "compose/README.md", "kubernetes/README.md", "nats/README.md"])
def test_commands_that_are_told_exist(path: str) -> None:
    named = {word for words in WORDS.findall((OPS / path).read_text()) for word in words if word}
    assert named
    assert named <= COMMANDS.keys()


def test_links_of_the_runbook_lead_somewhere() -> None:
    text = (OPS / "RUNBOOK.md").read_text()
    anchors = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert target[1:] in anchors if target.startswith("#") else (OPS / target).is_file()
