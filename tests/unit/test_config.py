"""Settings: each value in force is known by its source, and a typing error is refused by name."""

from pathlib import Path

import msgspec
import pytest

from nexus_bus import config
from nexus_bus.errors import Refused


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in __import__("os").environ if name.startswith("NEXUS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NEXUS_HOME", str(tmp_path / "home"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "nexus.toml"
    path.write_text('[all]\nlog_level = "debug"\nthreads = 2\n[inference]\nbatch = 16\nthreads = 3\n[trainer]\nslots = 2\n')
    return path


@pytest.mark.parametrize("role", config.ROLES)
def test_defaults_are_complete_and_say_so(role: str) -> None:
    loaded = config.load(role)
    assert set(loaded.sources.values()) == {"default"}
    assert list(loaded.sources) == [field.name for field in msgspec.structs.fields(config.ROLES[role])]


@pytest.mark.parametrize("role", config.ROLES)
def test_defaults_keep_their_own_limits(role: str) -> None:
    kind = config.ROLES[role]
    assert msgspec.convert(msgspec.to_builtins(kind()), kind) == kind()


def test_flags_win_over_environment_over_file_over_defaults(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXUS_LOG_LEVEL", "warning")
    monkeypatch.setenv("NEXUS_INFERENCE_WAIT_MS", "7.5")
    loaded = config.load("inference", flags={"wait_ms": 1.0, "slots": None}, file=file)
    value, sources = loaded.value, loaded.sources
    assert (value.batch, sources["batch"]) == (16, f"{file} [inference]")
    assert (value.threads, sources["threads"]) == (3, f"{file} [inference]")
    assert (value.log_level, sources["log_level"]) == ("warning", "NEXUS_LOG_LEVEL")
    assert (value.wait_ms, sources["wait_ms"]) == (1.0, "flag")
    assert (value.slots, sources["slots"]) == (64, "default")


def test_one_role_is_set_apart_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXUS_THREADS", "2")
    monkeypatch.setenv("NEXUS_TRAINER_THREADS", "4")
    assert config.load("inference").value.threads == 2
    assert config.load("trainer").value.threads == 4
    assert config.load("master").sources == dict.fromkeys(config.load("master").sources, "default")


def test_the_file_may_be_named_by_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXUS_CONFIG", str(file))
    assert config.load("trainer").value.slots == 2


def test_the_server_of_this_home_is_found() -> None:
    assert config.load("master").value.url == "nats://127.0.0.1:4222"
    config.home().mkdir()
    (config.home() / "url").write_text("nats://127.0.0.1:4333\n")
    assert config.load("master").value.url == "nats://127.0.0.1:4333"


def test_paths_lie_in_the_home_and_the_disk_cache_can_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path(config.load("environment").value.data_root).parent == config.home()
    monkeypatch.setenv("NEXUS_CACHE_DIR", "none")
    assert config.load("inference").value.cache_dir is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[inference]\nbach = 1", r"\[inference\] has no setting 'bach'; did you mean 'batch'\?"),
        ("[inferense]\nbatch = 1", r"no table \[inferense\]; did you mean 'inference'\?"),
        ("[all]\nbeats = 1", r"\[all\] has no setting 'beats'; did you mean 'beat_s'\?"),
        ("batch = 1", r"no table \[batch\]"),
        ("[trainer]\nslots = 0", r"slots = 0: Expected `int` >= 1"),
        ("[trainer]\nslots = [", r"nexus\.toml"),
    ],
)
def test_what_a_file_gets_wrong_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "nexus.toml"
    path.write_text(text)
    with pytest.raises(Refused, match=says):
        config.load("trainer", file=path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"absent\.toml"):
        config.load("trainer", file=tmp_path / "absent.toml")


def test_what_the_environment_or_a_flag_gets_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match=r"flag: trainer has no setting 'slot'; did you mean 'slots'\?"):
        config.load("trainer", flags={"slot": 3})
    monkeypatch.setenv("NEXUS_TRAINER_SLOTS", "many")
    with pytest.raises(Refused, match=r"NEXUS_TRAINER_SLOTS: slots = 'many'"):
        config.load("trainer")
    monkeypatch.setenv("NEXUS_INFERENCE_BACH", "1")
    with pytest.raises(Refused, match=r"NEXUS_INFERENCE_BACH: inference has no setting 'bach'; did you mean 'batch'\?"):
        config.load("inference")


def test_a_role_that_does_not_exist_is_named() -> None:
    with pytest.raises(Refused, match=r"role 'trainr' does not exist; did you mean 'trainer'\?"):
        config.load("trainr")


def test_rows_are_for_people() -> None:
    assert ("batch", "32", "default") in config.load("inference").rows()
