"""The conformance suite finds what it is for: heads broken in one way each. And a head that is installed is a head like any."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nexus_bus.errors import BadJob
from nexus_bus.models.catalog import check_head, head_entry, installed
from nexus_bus.models.features import FeatureBatch
from nexus_bus.models.heads import FeatureShape, HeadSample, PolicyModule, build_head, conformance
from nexus_bus.models.heads.base import ActionModule, masked_mean
from schemas.job import HeadSpec

EXAMPLE = Path(__file__).parents[3] / "ops" / "examples" / "head"


class Plain(PolicyModule):
    """A small good head; the others each break it in one way."""

    def __init__(self, spec: HeadSpec, shape: FeatureShape, state_size: int, action_size: int) -> None:
        super().__init__(spec, shape, state_size, action_size)
        self.linear = nn.Linear(shape.hidden + state_size, spec.horizon * action_size)
        self.log_std = nn.Parameter(torch.zeros(action_size))
        self.value = nn.Linear(shape.hidden, 1)

    def read(self, features: FeatureBatch) -> torch.Tensor:
        mask = features.mask.unsqueeze(-1)
        return (features.hidden * mask).sum(1) / mask.sum(1)

    def forward(self, features: FeatureBatch, state: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.cat([self.read(features), state], -1)).view(-1, self.horizon, self.action_size)

    def loss(
        self,
        features: FeatureBatch,
        state: torch.Tensor,
        actions: torch.Tensor,
        pad: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        return masked_mean((self(features, state) - actions).abs(), pad)

    def predict(self, features: FeatureBatch, state: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return self(features, state)

    def sample(self, features: FeatureBatch, state: torch.Tensor, generator: torch.Generator) -> HeadSample:
        mean = self(features, state)
        actions = mean + torch.randn(mean.shape, generator=generator) * self.log_std.exp()
        log_prob, _, value = self.evaluate(features, state, actions)
        return HeadSample(actions, log_prob, value)

    def evaluate(
        self, features: FeatureBatch, state: torch.Tensor, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        normal = torch.distributions.Normal(self(features, state), self.log_std.exp())
        return normal.log_prob(actions).sum(-1), normal.entropy().sum(-1), self.value(self.read(features)).squeeze(-1)

    def value_parameters(self) -> list[nn.Parameter]:
        return list(self.value.parameters())


def broken(**methods: Callable[..., Any]) -> type[Plain]:
    return type("Broken", (Plain,), methods)


def extra(make: Callable[[Plain], None]) -> Callable[..., None]:
    """An __init__ that adds something."""

    def init(self: Plain, *arguments: Any) -> None:
        Plain.__init__(self, *arguments)
        make(self)

    return init


def count_calls(self: Plain, features: FeatureBatch, state: torch.Tensor) -> torch.Tensor:
    self.seen += 1  # pyright: ignore[reportOperatorIssue]
    return Plain.forward(self, features, state)


BROKEN: dict[str, type[ActionModule]] = {
    "predict: its shape is not [B, T, D]": broken(predict=lambda self, f, s, g: self(f, s).flatten(1)),
    "sample.log_prob: its shape is not [B, T]": broken(
        sample=lambda self, f, s, g: HeadSample(
            (drawn := Plain.sample(self, f, s, g)).actions, drawn.log_prob.sum(1), drawn.value
        )
    ),
    "predict: holds numbers that are not finite": broken(predict=lambda self, f, s, g: self(f, s) / 0),
    "loss: shape [3], expected a scalar": broken(loss=lambda self, f, s, a, p, g: (self(f, s) - a).abs().mean((1, 2))),
    "loss: nan is not finite": broken(loss=lambda self, f, s, a, p, g: Plain.loss(self, f, s, a, p, g) * float("nan")),
    "loss: no finite gradient reaches 'idle'": broken(
        __init__=extra(lambda self: self.register_parameter("idle", nn.Parameter(torch.zeros(2))))
    ),
    "weights: 'drawn' differs between two builds from one seed": broken(
        __init__=extra(lambda self: self.register_buffer("drawn", torch.randn(2)))
    ),
    "weights: they are the same for every seed": broken(
        initialise=lambda self, seed: [nn.init.constant_(parameter, 0.1) for parameter in self.parameters()]
    ),
    "weights: 'odd' holds numbers that are not finite": broken(
        __init__=extra(lambda self: self.register_buffer("odd", torch.tensor([float("inf")])))
    ),
    "weights: with the weights of another build it answers differently": broken(
        initialise=lambda self, seed: (Plain.initialise(self, seed), setattr(self, "shift", seed)),
        predict=lambda self, f, s, g: self(f, s) + self.shift,
    ),
    "predict: draws from torch's global generator": broken(predict=lambda self, f, s, g: self(f, s) + torch.randn(1)),
    "loss: the same call with the same generator gives other numbers": broken(
        __init__=extra(lambda self: setattr(self, "drop", nn.Dropout(0.5))),
        forward=lambda self, f, s: self.drop(Plain.forward(self, f, s)),
    ),
    "predict: reads tokens behind features.mask": broken(read=lambda self, f: f.hidden.mean(1)),
    "loss: reads actions where pad is True": broken(loss=lambda self, f, s, a, p, g: (self(f, s) - a).abs().mean()),
    "predict: a row's answer depends on its neighbours": broken(predict=lambda self, f, s, g: self(f, s) - self(f, s).mean(0)),
    "predict: a row's answer depends on whether it has neighbours": broken(predict=lambda self, f, s, g: self(f, s) * len(f)),
    "predict: changes 'seen'": broken(
        __init__=extra(lambda self: self.register_buffer("seen", torch.zeros(1))), forward=count_calls
    ),
    "sample: the generator changes nothing": broken(
        sample=lambda self, f, s, g: Plain.sample(self, f, s, torch.Generator().manual_seed(0))
    ),
    "evaluate: log_prob of drawn actions differs from what sample says": broken(
        sample=lambda self, f, s, g: HeadSample((drawn := Plain.sample(self, f, s, g)).actions, drawn.log_prob + 1, drawn.value)
    ),
    "evaluate: the value differs from what sample says": broken(
        sample=lambda self, f, s, g: HeadSample((drawn := Plain.sample(self, f, s, g)).actions, drawn.log_prob, drawn.value + 1)
    ),
    "evaluate: log_prob depends on the value's parameters": broken(
        value_parameters=lambda self: [*self.value.parameters(), self.log_std]
    ),
    "evaluate: the value depends on more than value_parameters": broken(value_parameters=lambda self: []),
    "shapes: raises RuntimeError(": broken(
        forward=lambda self, f, s: self.linear(torch.cat([self.read(f), s], -1)).view(-1, 8, self.action_size)
    ),
}


def test_a_good_head_is_left_alone():
    assert conformance.check(Plain) == []


@pytest.mark.parametrize("says", BROKEN)
def test_a_broken_head_is_found_out(says: str):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    findings = conformance.check(BROKEN[says])
    assert sum(finding.startswith(says) for finding in findings) == 1, findings
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as pip leaves it, with the example head installed under some names."""
    (tmp_path / "mean_head.py").write_text((EXAMPLE / "mean_head.py").read_text())
    (tmp_path / "mean_head-1.0.dist-info").mkdir()
    (tmp_path / "mean_head-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mean-head\nVersion: 1.0\n")
    (tmp_path / "mean_head-1.0.dist-info" / "entry_points.txt").write_text(
        "[nexus_bus.heads]\nmean = mean_head:Mean\noft = mean_head:Mean\ngone = mean_head:Gone\nodd = mean_head:masked_mean\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mean_head", raising=False)
    return tmp_path


def test_an_installed_head_is_known_by_name_and_imported_when_asked_for(packages: Path):
    assert set(installed()) == {"mean", "gone", "odd"}, "a shipped name cannot be taken"
    assert "mean_head" not in sys.modules
    assert head_entry("mean").tiers == ("frozen", "lora")
    assert check_head(HeadSpec(type="mean")).options == {"width": 128}
    module = build_head(HeadSpec(type="mean", options={"width": 16}), FeatureShape(32, 4), 2, 3, seed=1)
    assert type(module).__name__ == "Mean"
    assert conformance.check("mean") == []
    assert type(build_head(HeadSpec(type="oft"), FeatureShape(32, 4), 2, 3, seed=1)).__module__.startswith("nexus_bus")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (HeadSpec(type="median"), "'median' does not exist; did you mean 'mean'\\? There are fast, gone, gr00t, mean"),
        (HeadSpec(type="gone"), "'gone': its package's 'mean_head:Gone' cannot be imported: AttributeError"),
        (HeadSpec(type="odd"), "'odd': its package's 'mean_head:masked_mean' is no class derived from ActionModule"),
        (HeadSpec(type="mean", options={"depth": 3}), "head.options.depth: 'mean' has no such option; did you mean 'width'"),
        (HeadSpec(type="mean", options={"width": 4}), r"head.options.width: 4 is outside \[8, 4096\]"),
    ],
)
def test_what_is_wrong_with_an_installed_head_is_said(packages: Path, spec: HeadSpec, says: str):
    with pytest.raises(BadJob, match=says):
        check_head(spec)


def test_a_listing_imports_no_installed_head(packages: Path):
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(packages)!r})\n"
        "from click.testing import CliRunner\n"
        "from nexus_bus.cli.catalog import catalog_command\n"
        "listed = CliRunner().invoke(catalog_command, [])\n"
        "assert 'installed: mean_head:Mean' in listed.output, listed.output\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'width of the MLP' in CliRunner().invoke(catalog_command, ['mean']).output\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_prints_findings_and_fails(capsys: pytest.CaptureFixture[str]):
    assert conformance.main("oft") == 0
    assert capsys.readouterr().out == "oft: no findings\n"
    name = f"{__name__}:Forgetful"
    assert conformance.main(name) == 1
    out = capsys.readouterr().out
    assert "predict: reads tokens behind features.mask (first seen with state_size 0, horizon 1)\n" in out


class Forgetful(Plain):
    """Forgets the mask."""

    def read(self, features: FeatureBatch) -> torch.Tensor:
        return features.hidden.mean(1)
