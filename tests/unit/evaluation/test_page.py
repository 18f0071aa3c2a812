"""The page of a report: whole by itself, with all numbers, and nothing of a message taken as markup."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

from nexus_bus.evaluation.files import write
from nexus_bus.evaluation.page import page
from nexus_bus.evaluation.summary import manifest
from schemas.evaluation import EvaluationEpisode, EvaluationFilm
from schemas.plan import JobState

Written = tuple[JobState, list[EvaluationEpisode], dict[str, EvaluationFilm]]

EVIL = '<script>alert("x")</script>'


class Reader(HTMLParser):
    """Tags that are open at the end, and every attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def written(played: Callable[..., EvaluationEpisode], job: Callable[..., JobState]) -> Written:
    state = job(episodes=4, tasks=("touch", "push"))
    episodes = [
        played(i, success=i < 5, task=("touch", "push")[i % 2], trial=i // 2, film=f"after-success-{i}" if i < 2 else "")
        for i in range(8)
    ]
    films = {
        f"after-success-{i}": EvaluationFilm(
            job="score", purpose="after", task="touch", trial=i, success=True, instruction=EVIL, data=b"film",
            media_type=("video/mp4", "image/gif")[i],
        )
        for i in range(2)
    }  # fmt: skip
    return state, episodes, films


def test_it_is_well_formed_has_the_numbers_and_asks_nobody(
    written: Written,
):
    state, episodes, films = written
    text = page(manifest(state, episodes), episodes, films)
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert {"svg", "video", "img", "table"} <= reader.tags
    assert not {"script", "link", "iframe"} & reader.tags
    for name, value in reader.attributes:
        if name in ("src", "href"):
            assert value.startswith("data:"), value[:60]
    assert "http://" not in text.replace("http-equiv", "")
    assert "https://" not in text
    assert "62.5 %" in text, "5 of 8"
    assert "30.6 – 86.3, 2 tasks pooled" in text
    assert "one interval over all episodes, as if they were of one task" in text
    assert "touch, trial 0, seed 500 (pick@3)" in text, "under its film"
    assert "one picture per decision, of 4 steps each" in text
    assert "0.75 s, and 1.00 s waiting" in text, "a number, not a bar"
    assert "t-wait" not in text
    assert EVIL not in text
    assert "&lt;script&gt;" in text


def test_what_a_tenant_calls_its_things_is_no_markup(
    written: Written,
):
    state, episodes, films = written
    made = manifest(
        replace(state, phase="failed", reason=EVIL), [replace(one, task=EVIL, simulator=EVIL) for one in episodes[:7]]
    )
    text = page(made, episodes, films)
    assert EVIL not in text
    assert "<script" not in text


def test_files_are_written_beside_it_and_replaced(written: Written, tmp_path: Path):
    state, episodes, films = written
    for _ in range(2):
        files = write(tmp_path / "out", manifest(state, episodes), episodes, films)
    names = sorted(str(path.relative_to(tmp_path / "out")) for path in files)
    assert names == [
        "episodes.jsonl", "films/after-success-0.mp4", "films/after-success-1.gif", "manifest.json", "protocol.toml",
        "report.html",
    ]  # fmt: skip
    read = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert read["evaluations"][0]["overall"]["successes"] == 5
    lines = [json.loads(line) for line in (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    assert {(one["attempts"], one["service"]) for one in lines} == {(1, "")}, "what holds its default, too"
    protocol = read["protocol"]
    assert (protocol["success"], protocol["image_encoding"], protocol["films"]) == ("any_step", "png", 4)
    assert "version" in read["evaluations"][0]
    assert re.search(r'^tasks = \["touch", "push"\]$', (tmp_path / "out" / "protocol.toml").read_text(), re.MULTILINE)
