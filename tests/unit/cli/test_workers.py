"""`nexus scale` and `nexus workers`: what is refused before anything is asked."""

import pytest

from nexus_bus.cli import main
from nexus_bus.cli.workers import parse_counts
from nexus_bus.errors import Refused


def test_counts_are_read():
    assert parse_counts(("rollout=3", "trainer=0"), force=False) == {"rollout": 3, "trainer": 0}
    assert parse_counts(("master=0",), force=True) == {"master": 0}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("rolout=3", "no role 'rolout'; did you mean 'rollout'"),
        ("rollout", "'rollout' is not of the form ROLE=N, as rollout=2"),
        ("rollout=-1", "is not of the form ROLE=N"),
        ("rollout=many", "is not of the form ROLE=N"),
        ("master=0", "master=0 leaves nobody to do what only a master does; --force"),
        ("health=0", "health=0 leaves nobody"),
        ("gateway=0", "gateway=0 leaves nobody"),
    ],
)
def test_counts_are_refused_by_what_is_wrong(given: str, said: str):
    with pytest.raises(Refused, match=said):
        parse_counts((given,), force=False)


def test_up_refuses_bounds_that_are_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    assert main(["up", "--autoscale", "rollout=3"]) == 2
    assert "rollout='3' must be MIN..MAX" in capsys.readouterr().err
    monkeypatch.setenv("NEXUS_AUTOSCALE", "rolout=1..2")
    assert main(["up"]) == 2
    assert "did you mean 'rollout'" in capsys.readouterr().err


def test_bounds_may_stand_in_the_settings_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
):
    path = f"{tmp_path}/nexus.toml"
    with open(path, "w", encoding="utf-8") as file:
        file.write('[up]\nautoscale = "rollout=9..1"\n')
    monkeypatch.setenv("NEXUS_CONFIG", path)
    assert main(["up"]) == 2
    assert "rollout='9..1' must be MIN..MAX" in capsys.readouterr().err
