"""Datasets over a tenant's account: pushed to real environment workers, whatever is killed; listed, replaced, dropped."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pushing import LENGTH, Sending, content, make, process, worker

from nexus_bus import registry, uploads
from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.client import Client
from nexus_bus.data.reader import Dataset
from nexus_bus.errors import Conflict, NotFound, Refused
from nexus_bus.plan import compile_plan
from schemas.environment import PrepareOrder
from schemas.job import ExpertSpec, JobSpec
from schemas.plan import JobState
from tests.conftest import Eventually
from workers import environment

pytestmark = pytest.mark.timeout(240)


# The way there


async def test_what_was_pushed_lies_there_to_the_byte_counts_and_is_gone_when_it_is_dropped(
    acme: Client, served: environment.Environment, server: EmbeddedServer, root: Path, tmp_path: Path, eventually: Eventually
) -> None:
    source = make(tmp_path / "demo", episodes=3, extra=700_000)
    (source / "notes/empty").touch()
    (source / ".cache").mkdir()
    (source / ".cache/token").write_text("secret")
    (source / ".hidden").write_text("secret")
    async with worker(server.url, root, "environment-1"):  # two share the disk, and the pieces
        pushed = await acme.push_dataset(source)
    sent = {path: data for path, data in content(source).items() if "secret" not in data.decode(errors="ignore")}
    assert content(root / "acme/demo") == sent
    assert (pushed.dataset, pushed.episodes, pushed.frames, pushed.version) == ("demo", 3, 3 * LENGTH, "v3.0")
    assert (pushed.files, pushed.bytes) == (len(sent), sum(map(len, sent.values())))
    assert await acme.datasets() == [pushed]

    async def keeps(size: int) -> bool:
        return (await acme.account()).used["stored_bytes"] == size

    await eventually(lambda: keeps(pushed.bytes))
    assert await acme.push_dataset(source) == pushed, "the same again is the same"
    assert await acme.drop_dataset("demo") == pushed.bytes
    assert await acme.datasets() == []
    assert not (root / "acme/demo").exists()
    await eventually(lambda: keeps(0))
    with pytest.raises(NotFound, match="no 'demo' of yours"):
        await acme.drop_dataset("demo")
    assert [entry.action async for entry in acme.audit()] == ["tenant.add", "data.commit", "data.drop", "data.drop"]


async def test_a_push_that_was_broken_off_goes_on_where_it_was(
    acme: Client, served: environment.Environment, root: Path, tmp_path: Path
) -> None:
    class Enough(Exception):
        pass

    def stop_half_way(what: str, done: int, total: int) -> None:
        if what == "sending" and done > total // 2:
            raise Enough

    source = make(tmp_path / "demo", extra=4_000_000)
    with pytest.raises(Enough):
        await acme.push_dataset(source, progress=stop_half_way)
    assert await acme.datasets() == [], "nothing of it can be named by a job yet"
    (unfinished,) = await acme.unfinished_datasets()
    assert unfinished.dataset == "demo"
    assert unfinished.sent > unfinished.bytes // 2
    seen: list[tuple[str, int, int]] = []
    await acme.push_dataset(source, progress=lambda *said: seen.append(said))
    begun = next(done for what, done, _ in seen if what == "sending")
    assert begun >= unfinished.sent
    assert content(root / "acme/demo") == content(source)
    assert await acme.unfinished_datasets() == []


async def test_the_same_push_from_two_machines_ends_well_on_both(
    acme: Client, served: environment.Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, slower, send = make(tmp_path / "demo"), acme.for_tenant("acme"), Client._send

    async def late(self: Client, *what: Any) -> None:
        """Sends its pieces once the other one is done."""
        if self is slower:
            await acme.push_dataset(source)
        await send(self, *what)

    monkeypatch.setattr(Client, "_send", late)
    pushed = await slower.push_dataset(source)
    assert await acme.datasets() == [pushed]


async def test_the_worker_is_killed_in_the_middle_and_the_push_goes_on_with_the_next(
    acme: Client, server: EmbeddedServer, root: Path, tmp_path: Path
) -> None:
    source = make(tmp_path / "demo", extra=6_000_000)
    half, killed = asyncio.Event(), asyncio.Event()

    def note(what: str, done: int, total: int) -> None:
        if what == "sending" and done > total // 2:
            half.set()

    pushing = asyncio.create_task(acme.push_dataset(source, progress=note))
    async with process(server.url, root) as first:
        async with asyncio.timeout(60):
            await half.wait()
        first.kill()
        await first.wait()
        killed.set()
    async with process(server.url, root):
        pushed = await asyncio.wait_for(pushing, 60)
    assert killed.is_set()
    assert content(root / "acme/demo") == content(source)
    assert pushed.bytes == sum(map(len, content(source).values()))


async def test_the_command_is_killed_in_the_middle_and_the_same_command_goes_on(
    acme: Client, served: environment.Environment, server: EmbeddedServer, root: Path, tmp_path: Path,
    eventually: Eventually,
) -> None:  # fmt: skip
    source = make(tmp_path / "demo", shade=90, extra=24_000_000)
    creds = server.directory / "acme.creds"
    hidden = ("NEXUS_AUTHORITY", "NEXUS_URL", "NEXUS_HOME", "NEXUS_CREDS", "NEXUS_TENANT")
    alone = {key: value for key, value in os.environ.items() if key not in hidden}
    words = [sys.executable, "-m", "nexus_bus.cli", "data", "push", str(source), "--creds", str(creds), "--url", server.url]
    command = subprocess.Popen(words, env=alone, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)  # noqa: ASYNC220

    async def sent() -> int:
        return sum(one.sent for one in await acme.unfinished_datasets())

    there = await eventually(sent, within=60)
    command.send_signal(signal.SIGKILL)
    command.communicate()
    assert command.returncode == -signal.SIGKILL
    assert there < 24_000_000
    again = await asyncio.create_subprocess_exec(*words, "--json", env=alone, stdout=-1, stderr=-1, cwd=tmp_path)
    said, complaint = await again.communicate()
    assert again.returncode == 0, complaint
    assert msgspec.json.decode(said)["episodes"] == 2
    said_of_it = complaint.decode().splitlines()
    assert said_of_it, "its numbers are all the same"
    assert all(line.startswith("warning constant [") for line in said_of_it), "nobody watches, so there is no bar"
    assert content(root / "acme/demo") == content(source)


async def test_a_worker_killed_before_or_after_it_put_a_dataset_in_place_leaves_nothing_half(
    acme: Client, served: environment.Environment, bus: Bus, root: Path, tmp_path: Path
) -> None:
    sending = Sending(acme, make(tmp_path / "demo"))
    await sending.begin()
    await sending.all()
    kept = shutil.copytree(root / "acme" / uploads.INCOMING / sending.upload, tmp_path / "kept")
    placed = await sending.commit()
    shutil.copytree(kept, root / "acme" / uploads.INCOMING / sending.upload)  # killed before it cleared up
    assert await sending.commit() == placed, "who got no answer asks again"
    assert uploads.uploads(root / "acme") == []
    shutil.rmtree(root / "acme/shelf")  # killed after it counted, before it put in place
    shutil.copytree(kept, root / "acme" / uploads.INCOMING / sending.upload)
    assert (await sending.commit()).bytes == placed.bytes
    assert content(root / "acme/shelf") == sending.files


# Replaced


async def test_a_dataset_is_replaced_at_once_and_who_reads_the_old_one_is_told(
    acme: Client, served: environment.Environment, root: Path, tmp_path: Path
) -> None:
    one, other = make(tmp_path / "one", shade=1), make(tmp_path / "other", shade=2, episodes=3)
    await acme.push_dataset(one, name="demo")
    with pytest.raises(Refused, match="'demo' is there already"):
        await acme.push_dataset(other, name="demo")
    path = root / "acme/demo"
    before = await served._dataset(path)
    assert served._images(before, 0, "png")
    old = Dataset(path)
    over, seen = threading.Event(), set[int]()

    def look() -> None:  # fails if for a moment nothing, or half of something, lies there
        while not over.is_set():
            with suppress(Conflict):
                seen.add(len(environment.opened(path)))

    looking = asyncio.create_task(asyncio.to_thread(look))
    for source in (other, one, other):
        await acme.push_dataset(source, name="demo", replace=True)
    over.set()
    await looking
    assert seen <= {2 * LENGTH, 3 * LENGTH}
    assert old.image("observation.images.top", 0).min() == 1, "what it has open is whole"
    old.close()
    with pytest.raises(Conflict, match="while it was read; open it again"):
        old.image("observation.images.top", 0)
    after = await served._dataset(path)
    assert after is not before
    assert len(after) == 3 * LENGTH
    assert {picture.min() for picture in after.images(0).values()} == {2}
    shown = served._images(after, 0, "raw")
    assert {bytes(image.data[:1]) for image in shown.values()} == {b"\x02"}, "no picture of the old one"


async def test_what_a_job_reads_is_neither_replaced_nor_dropped(
    acme: Client, served: environment.Environment, bus: Bus, tmp_path: Path
) -> None:
    one, other = make(tmp_path / "one", shade=1), make(tmp_path / "other", shade=2)
    await acme.push_dataset(one, name="demo")
    document = {
        "kind": "sft", "name": "reader", "environment": {"id": "tabletop", "task": "touch"}, "data": {"dataset": "demo"},
        "algorithm": {"name": "sft", "steps": 20},
    }  # fmt: skip
    plan = compile_plan(msgspec.convert(document, JobSpec), "acme")
    state = JobState(plan=plan, phase="training", submission="s", submitted="now")
    await bus.kv("registry").put(registry.job_key("acme", "reader"), state)
    with pytest.raises(Refused, match="the job 'reader' reads 'demo'; let it end or cancel it, then replace it"):
        await acme.push_dataset(other, name="demo", replace=True)
    with pytest.raises(Refused, match="the job 'reader' reads 'demo'"):
        await acme.drop_dataset("demo")
    await bus.kv("registry").put(registry.job_key("acme", "reader"), msgspec.structs.replace(state, phase="completed"))
    await acme.push_dataset(other, name="demo", replace=True)
    order = PrepareOrder(
        tenant="acme", job="demo", dataset="demo", environment=plan.spec.environment, expert=ExpertSpec(episodes=1)
    )
    with pytest.raises(Refused, match="'demo' was pushed, and a recording would replace it"):
        await served.prepare(order)
    await acme.drop_dataset("demo")
