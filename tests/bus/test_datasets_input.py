"""What a tenant may not push: what is no dataset, what leads elsewhere, more than it may keep, or than the disk holds."""

import asyncio
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pushing import DATA, Sending, content, make, process, tenant

from nexus_bus import uploads
from nexus_bus.bus import Bus, EmbeddedServer
from nexus_bus.client import Client
from nexus_bus.errors import BadMessage, Conflict, NexusError, NotFound, Refused
from nexus_bus.incoming import Arriving
from nexus_bus.tenants import tenants_of
from schemas.dataset import DatasetAsked, DatasetBegin, DatasetCommit, DatasetFile, DatasetPut
from tests.conftest import Eventually
from workers import environment

pytestmark = pytest.mark.timeout(240)


# Bad input


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda root: (root / DATA).write_bytes(b"PAR1 and no more"), f"{DATA}: no whole parquet file"),
        (lambda root: (root / "meta/tasks.parquet").unlink(), "meta/tasks.parquet"),
        (lambda root: (root / "meta/info.json").write_text("{"), "meta/info.json: not readable JSON"),
        (lambda root: (root / "meta/info.json").unlink(), "there is no meta/info.json"),
        (lambda root: (root / DATA).unlink(), f"there is no {DATA}"),
    ],
)
async def test_what_is_no_dataset_is_refused_by_the_file_here_and_there(
    acme: Client, served: environment.Environment, root: Path, tmp_path: Path, damage: Callable[[Path], Any], said: str
) -> None:
    source = make(tmp_path / "demo")
    damage(source)
    with pytest.raises(NexusError) as here:
        await acme.push_dataset(source)
    sending = Sending(acme, source)  # by somebody who does not look before
    await sending.begin()
    await sending.all()
    with pytest.raises(NexusError) as there:
        await sending.commit()
    assert said in str(here.value)
    assert said in str(there.value)
    assert sending.upload not in str(there.value), "its names are those that the tenant gave"
    assert await acme.datasets() == []
    assert not (root / "acme/shelf").exists()


async def test_a_file_that_is_not_what_the_list_says_is_named_and_sent_anew(
    acme: Client, served: environment.Environment, root: Path, tmp_path: Path
) -> None:
    source = make(tmp_path / "demo")
    sending = Sending(acme, source)
    await sending.begin({DATA: "0" * 64})
    await sending.all()
    for _ in range(2):
        with pytest.raises(BadMessage, match=DATA):
            await sending.commit()
    assert (await sending.begin({DATA: "0" * 64})).have[list(sending.files).index(DATA)] == 0
    with pytest.raises(BadMessage, match="begun with other files"):
        await sending.begin()
    pushed = await acme.push_dataset(source, name="shelf")
    assert pushed.episodes == 2


async def test_what_is_not_whole_is_not_put_in_place(
    acme: Client, served: environment.Environment, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexus_bus.client.calls.AGAIN_S", 3600.0)  # what may pass would be asked again
    sending = Sending(acme, make(tmp_path / "demo"))
    with pytest.raises(NotFound, match="begin it first"):
        await sending.put(DATA)
    with pytest.raises(NotFound, match="no 'abababab"):
        await sending.commit()
    await sending.begin()
    size = len(sending.files[DATA])
    with pytest.raises(BadMessage, match=f"0 of {len(next(iter(sending.files.values())))} bytes are there"):
        await sending.commit()
    with pytest.raises(Conflict, match=f"offset: 0 bytes of {DATA} are there"):
        await sending.put(DATA, 10, b"x")
    with pytest.raises(BadMessage, match=f"up to byte {size + 1}; the list says {size} bytes"):
        await sending.put(DATA, size, b"x")
    with pytest.raises(BadMessage, match="not among the files"):
        await sending.put("meta/other.json", 0, b"x")
    lock = uploads.Upload(root / "acme", sending.upload).lock()  # as another worker that checks it
    assert lock is not None
    with pytest.raises(Conflict, match="is being checked"):
        await sending.put(DATA)
    order = DatasetCommit(dataset="shelf", upload=sending.upload)
    assert (await acme.call("data.commit", order)).dataset is None, "ask again"
    os.close(lock)
    for path in sending.files:
        await sending.put(path)
        await sending.put(path)  # twice is once
    assert (await sending.commit()).files == len(sending.files)


@pytest.mark.parametrize(
    "paths",
    [
        ["../acme/x"], ["/etc/passwd"], ["a/../b"], ["a//b"], ["./a"], ["a/"], [".git/config"], ["a\0b"], ["a\nb"], ["a\\b"],
        ["c:x"], ["a."], ["x" * 256], ["/".join("a" * 17)], ["ä" * 200], ["a", "a"], ["a", "a/b"], ["a/b", "a"], ["A/x", "a/y"],
        ["x/é", "x/e\u0301"],
    ],
    ids=repr,
)  # fmt: skip
async def test_paths_that_mean_something_else_on_some_disk_are_refused(
    acme: Client, served: environment.Environment, root: Path, paths: list[str]
) -> None:
    files = [DatasetFile(path=path, size=1, sha256="0" * 64) for path in paths]
    with pytest.raises(BadMessage, match="path"):
        await acme.call("data.begin", DatasetBegin(dataset="shelf", upload="ab" * 8, files=files, last=True))
    with pytest.raises(NotFound):
        await acme.call("data.put", DatasetPut(upload="ab" * 8, path=paths[0], offset=0, data=b"x"))
    assert set(content(root)) <= {f"acme/{uploads.INCOMING}/.adding"}, "nor does it count among those that are not finished"


async def test_a_link_that_leads_out_of_the_directory_is_not_followed(acme: Client, tmp_path: Path) -> None:
    source = make(tmp_path / "demo")
    (tmp_path / "secret").write_text("of mine")
    (source / "notes").symlink_to(tmp_path / "secret")
    with pytest.raises(BadMessage, match="notes: leads out of the dataset"):
        await acme.push_dataset(source)
    with pytest.raises(Refused, match="give it one"):
        await acme.push_dataset(make(tmp_path / "My Data"))


# Bounds


async def test_what_is_kept_ends_at_the_tenants_limit(
    acme: Client, served: environment.Environment, bus: Bus, server: EmbeddedServer, tmp_path: Path, eventually: Eventually
) -> None:
    source = make(tmp_path / "demo", extra=100_000)
    size = sum(map(len, content(source).values()))
    async with tenants_of(server.url, server.authority) as operator:
        await operator.limit("acme", {"stored_bytes": size + 1000})
    sending = Sending(acme, source, dataset="one")
    await sending.begin()
    with pytest.raises(Refused, match=f"limits.stored_bytes: {size:,} bytes, and {size:,} of other uploads, and you may keep"):
        await acme.push_dataset(source, name="two")
    await sending.all()
    await sending.commit()

    async def counted() -> bool:
        return (await acme.account()).used["stored_bytes"] == size

    await eventually(counted)
    with pytest.raises(Refused, match=f"limits.stored_bytes: {size:,} bytes, and you may keep 1,000 more"):
        await acme.push_dataset(source, name="two")
    await acme.drop_dataset("one")
    assert (await acme.push_dataset(source, name="two")).bytes == size


async def test_uploads_whose_lists_become_whole_at_once_share_the_room_that_is_left(
    bus: Bus, served: environment.Environment, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet, allow = threading.Barrier(4), Arriving._allow

    def together(*given: Any, **named: Any) -> None:
        allow(*given, **named)
        with suppress(threading.BrokenBarrierError):  # which is what a lock makes of it
            meet.wait(1.0)

    monkeypatch.setattr(Arriving, "_allow", together)

    def begin(number: int) -> str:
        arriving = Arriving(bus, root, served.context.pulse, 1 << 30)
        files = [DatasetFile(path="a", size=1000, sha256="0" * 64)]
        begun = DatasetBegin(dataset=f"d{number}", upload=f"{number:08x}", files=files, last=True)
        try:
            arriving._begin("acme", DatasetAsked(begin=begun, room=1500))
        except Refused as error:
            return str(error)
        return ""

    said = await asyncio.gather(*(asyncio.to_thread(begin, number) for number in range(4)))
    assert sorted(map(bool, said)) == [False, True, True, True]
    assert all(why.startswith("limits.stored_bytes: 1,000 bytes, and 1,000 of other uploads") for why in said if why)
    assert sum(one.manifest() is not None for one in uploads.uploads(root / "acme")) == 1


async def test_four_may_be_unfinished_and_a_day_later_they_are_forgotten(
    acme: Client, served: environment.Environment, root: Path, tmp_path: Path
) -> None:
    source = make(tmp_path / "demo")
    begun = [Sending(acme, source, upload=f"{n:08x}", dataset=f"d{n}") for n in range(5)]
    for sending in begun[:4]:
        await sending.begin()
        await sending.put(DATA)
    with pytest.raises(Refused, match="4 uploads of yours are not finished"):
        await begun[4].begin()
    assert await acme.drop_dataset("d3") == len(begun[3].files[DATA])
    await begun[4].begin()
    home = root / "acme"
    day_ago = time.time() - 90_000
    for sending in begun[:2]:
        os.utime(home / uploads.INCOMING / sending.upload / "lock", (day_ago, day_ago))
    lock = uploads.Upload(home, begun[1].upload).lock()  # somebody is at work on it
    assert lock is not None
    await asyncio.gather(*(asyncio.to_thread(uploads.sweep, home, 86_400.0) for _ in range(4)))  # as many workers do it
    os.close(lock)
    assert [one.dataset for one in await acme.unfinished_datasets()] == ["d1", "d2", "d4"]
    half = DatasetBegin(dataset="half", upload="ee" * 4, files=[DatasetFile(path="a", size=1, sha256="0" * 64)])
    await acme.call("data.begin", half)  # whoever sent it was killed before the next page
    listing = uploads.Upload(home, half.upload)
    for age, there in ((500, True), (700, False)):
        os.utime(listing.root / "lock", (time.time() - age, time.time() - age))
        await asyncio.to_thread(uploads.sweep, home, 86_400.0)
        assert listing.exists is there
    assert [path.name for path in (home / uploads.INCOMING).glob(".*")] == [".adding"]


def _tmpfs_may_be_mounted() -> bool:
    words = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=1m none /mnt"]
    return shutil.which("unshare") is not None and subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _tmpfs_may_be_mounted(), reason="needs user namespaces, for a small disk of its own")
async def test_a_full_disk_says_so_and_the_push_goes_on_once_there_is_room(
    acme: Client, server: EmbeddedServer, root: Path, tmp_path: Path
) -> None:
    root.mkdir()  # noqa: ASYNC240 - one call
    # The worker's disk is 8 MB, of which something else takes up five once half of what is pushed is there.
    until = "until [ -e {} ]; do sleep 0.02; done"
    steps = (
        f"mount -t tmpfs -o size=8m none {root}",
        f"({until.format(tmp_path / 'fill')}; head -c 5000000 /dev/zero > {root}/other; touch {tmp_path}/filled",
        f'{until.format(tmp_path / "free")}; rm {root}/other; touch {tmp_path}/freed) & exec "$@"',
    )
    script = "; ".join(steps)
    source = make(tmp_path / "demo", extra=5_000_000)

    def fill(what: str, done: int, total: int) -> None:
        if what == "sending" and done > 1_500_000 and not (tmp_path / "filled").exists():
            (tmp_path / "fill").touch()
            while not (tmp_path / "filled").exists():
                time.sleep(0.01)

    async with process(server.url, root, "unshare", "-rm", "sh", "-c", script, "sh"):
        with pytest.raises(Refused, match="the disk of the service is full: what was sent stays"):
            await acme.push_dataset(source, progress=fill)
        assert await acme.datasets() == []
        (unfinished,) = await acme.unfinished_datasets()
        assert 1_500_000 < unfinished.sent < 5_000_000
        (tmp_path / "free").touch()
        while not (tmp_path / "freed").exists():
            await asyncio.sleep(0.01)
        with pytest.raises(Refused, match=r"the disk of the service has no room for 16,[\d,]+ bytes"):
            await acme.push_dataset(make(tmp_path / "large", extra=16_000_000))
        pushed = await acme.push_dataset(source)
        assert pushed.bytes == sum(map(len, content(source).values()))


async def test_another_tenants_are_not_there(
    acme: Client, served: environment.Environment, server: EmbeddedServer, root: Path, tmp_path: Path
) -> None:
    source = make(tmp_path / "demo")
    await acme.push_dataset(source)
    other = Sending(acme, source)
    await other.begin()
    async with tenant(server, "globex", payload_bytes=4096) as client:
        assert await client.datasets() == await client.unfinished_datasets() == []
        with pytest.raises(NotFound):
            await client.drop_dataset("demo")
        with pytest.raises(NotFound):
            await client.call("data.put", DatasetPut(upload=other.upload, path=DATA, offset=0, data=b"x"))
        with pytest.raises(NexusError, match="public"):
            await client.push_dataset(source, name="public")
        assert (await client.push_dataset(source)).dataset == "demo", "in small messages, under a name of its own"
    with pytest.raises(NotFound, match="not a directory below"):
        served.directory("acme", f".incoming/{other.upload}/files")  # what is not finished is read by no job
    assert content(root / "globex/demo") == content(root / "acme/demo") == content(source)
