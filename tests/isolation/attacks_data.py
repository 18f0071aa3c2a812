"""Attacks on datasets of others: by names, by uploads' ids, by paths; and floods of what a tenant may send."""

import asyncio
import hashlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from nexus_bus import uploads
from nexus_bus.bus import Bus
from nexus_bus.bus.authority import PROVIDER_FILE
from nexus_bus.incoming import UPLOADS, Arriving
from nexus_bus.worker import Pulse
from tests.isolation.attack import attack
from tests.isolation.attacker import Answer, Attacker
from tests.isolation.comparison import differ
from tests.isolation.siege import INTRUDER, MARK, VICTIM, Siege

SHELF, ABSENT = "walks", "wants"  # a dataset of the victim's, and one that nobody has
UPLOAD, ABSENT_UPLOAD, OWN = "a1" * 16, "b2" * 16, "c3" * 16
INFO = "meta/info.json"
PUBLIC = "public/walks"
CROWD = 16


@asynccontextmanager
async def storehouse(siege: Siege) -> AsyncIterator[Path]:
    """An environment worker's data root: the victim's dataset, an upload of it under way, and what all may read."""
    root = Path(tempfile.mkdtemp(prefix="nexus-data-"))
    bus = await Bus.connect(siege.url, name="environment-1", creds=siege.authority / PROVIDER_FILE)
    serving = Arriving(bus, root, Pulse(), 8 << 30)
    await serving.open()
    try:
        for home in (root / VICTIM / SHELF, root / PUBLIC):
            (home / "meta").mkdir(parents=True)
            (home / INFO).write_text(f'{{"robot": "{MARK}"}}')
        await _begun(siege.victim, UPLOAD, {INFO: MARK.encode()}, "runs")
        await siege.victim.pack("data.put", {"upload": UPLOAD, "path": INFO, "offset": 0, "data": MARK.encode()[:4]})
        yield root
    finally:
        await serving.close()
        await bus.close()
        shutil.rmtree(root, ignore_errors=True)


def _files(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [{"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for path, data in files.items()]


async def _begun(who: Attacker, upload: str, files: dict[str, bytes], dataset: str) -> Answer:
    return await who.call("data.begin", {"dataset": dataset, "upload": upload, "files": _files(files), "last": True})


async def _in_crowds(call: Callable[[int], Awaitable[Answer]], count: int) -> None:
    """As many at once as the intruder's subscriptions allow."""
    for first in range(0, count, CROWD):
        await asyncio.gather(*(call(n) for n in range(first, min(first + CROWD, count))))


def _lies(root: Path) -> dict[str, bytes]:
    """Everything that is not the intruder's."""
    own = root / INTRUDER
    every = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    return {str(path): path.read_bytes() for path in every if not path.is_relative_to(own)}


@attack("The victim's datasets listed, and those of all tenants, by every word that a list takes.")
async def datasets_of_another_listed(siege: Siege, intruder: Attacker) -> str | None:
    async with storehouse(siege):
        for query in ({}, {"after": f"../{VICTIM}/"}, {"after": "\0"}, {"tenant": VICTIM}, {"dataset": SHELF}, {"limit": 20}):
            answer = await intruder.call("data.list", query)
            if answer.error or answer.content.get("datasets") or answer.content.get("unfinished"):
                return f"{query}: {answer}"
        assert MARK.encode() not in intruder.received
        listed = await siege.victim.call("data.list", {})
        return None if [one["dataset"] for one in listed.content["datasets"]] == [SHELF] else f"the victim's: {listed}"


@attack("The victim's dataset dropped, by its name and by paths to it.")
async def dataset_of_another_dropped(siege: Siege, intruder: Attacker) -> str | None:
    async with storehouse(siege) as root:
        before = _lies(root)
        there, absent = [await intruder.call("data.drop", {"dataset": name}) for name in (SHELF, ABSENT)]
        if evidence := differ(there, absent, SHELF, ABSENT):
            return evidence
        paths = f"../{VICTIM}/{SHELF}", f"{VICTIM}/{SHELF}", PUBLIC, "public", f"{SHELF}\n"
        for name in (*paths, ".", "..", "", ".incoming", "*"):
            if not (answer := await intruder.call("data.drop", {"dataset": name})).error:
                return f"{name!r}: {answer}"
        return None if _lies(root) == before else "something is gone"


@attack("The victim's dataset overwritten, by its name, by paths and as what every tenant may read.")
async def dataset_of_another_overwritten(siege: Siege, intruder: Attacker) -> str | None:
    async with storehouse(siege) as root:
        before, poison = _lies(root), {INFO: b"poison"}
        for name in (f"../{VICTIM}/{SHELF}", f"{VICTIM}/{SHELF}", PUBLIC, "public", "..", ".incoming", f"{SHELF}\0", "X"):
            begin = {"dataset": name, "upload": OWN, "files": _files(poison), "last": True, "replace": True}
            if not (answer := await intruder.call("data.begin", begin)).error:
                return f"{name!r}: {answer}"
            if not (answer := await intruder.call("data.commit", {"dataset": name, "upload": OWN, "replace": True})).error:
                return f"{name!r}: {answer}"
        # Under the same name as the victim's, in its own place.
        assert not (await _begun(intruder, OWN, poison, SHELF)).error
        for tenant in ({}, {"tenant": VICTIM}):
            put = {"upload": OWN, "path": INFO, "offset": 0, "data": b"poison"} | tenant
            assert not (await intruder.pack("data.put", put)).error
            commit = {"dataset": SHELF, "upload": OWN, "replace": True} | tenant
            while not (answer := await intruder.call("data.commit", commit)).error:
                if answer.content.get("dataset"):
                    return f"poison was put in place: {answer}"  # without, it is still being checked
        return None if _lies(root) == before else "something was written"


@attack("The victim's upload, by its id: gone on with, put in place, asked about.")
async def upload_of_another(siege: Siege, intruder: Attacker) -> str | None:
    async with storehouse(siege) as root:
        before = _lies(root)
        for upload in (f"../../{VICTIM}/.incoming/{UPLOAD}", f"{UPLOAD}/files", "..", "", UPLOAD + "\n", "*"):
            put = {"upload": upload, "path": INFO, "offset": 4, "data": b"poison"}
            if (answer := await intruder.pack("data.put", put)).error != "bad_message":
                return f"{upload!r}: {answer}"
        for offset in (0, 4):
            puts = [
                await intruder.pack("data.put", {"upload": one, "path": INFO, "offset": offset, "data": b"poison"})
                for one in (UPLOAD, ABSENT_UPLOAD)
            ]
            if evidence := differ(puts[0], puts[1], UPLOAD, ABSENT_UPLOAD):
                return evidence
        ends = [await intruder.call("data.commit", {"dataset": "runs", "upload": one}) for one in (UPLOAD, ABSENT_UPLOAD)]
        if evidence := differ(ends[0], ends[1], UPLOAD, ABSENT_UPLOAD):
            return evidence
        begun = [await _begun(intruder, one, {INFO: MARK.encode()}, "runs") for one in (UPLOAD, ABSENT_UPLOAD)]
        if begun[0].content != begun[1].content or any(begun[0].content["have"]):
            return f"says how much of it is there: {begun}"
        return None if _lies(root) == before else "something was written"


@attack("Paths that lead out of the dataset, in the list of files and in pieces, through links as well.")
async def paths_that_lead_out(siege: Siege, intruder: Attacker) -> str | None:
    async with storehouse(siege) as root:
        before = _lies(root)
        out = f"../../../../{VICTIM}/{SHELF}/{INFO}"
        longer = "x" * 256, "a/" * 40 + "b", "\\\\x", str(root / VICTIM / SHELF / INFO)
        for path in (out, f"a/../{out}", ".", "..", "a\0b", "/", *longer):
            begun = await _begun(intruder, OWN, {path: b"poison"}, "own")
            put = await intruder.pack("data.put", {"upload": OWN, "path": path, "offset": 0, "data": b"poison"})
            if not begun.error or not put.error:
                return f"{path!r}: {begun} {put}"
        await intruder.call("data.drop", {"dataset": "own"})
        upload = "d4" * 16  # a link can only come there by another's hand, and even then it is not followed
        assert not (await _begun(intruder, upload, {"link": b"poison"}, "own")).error
        files = uploads.Upload(root / INTRUDER, upload).files
        files.mkdir()
        (files / "link").symlink_to(root / VICTIM / SHELF / INFO)
        put = await intruder.pack("data.put", {"upload": upload, "path": "link", "offset": 0, "data": b"poison"})
        if not put.error:
            return f"through a link: {put}"
        return None if _lies(root) == before else "something was written"


@attack("Wrong hashes, wrong sizes, and an end before the end: what lies in place is what was listed, or nothing.")
async def an_end_before_the_end(siege: Siege, intruder: Attacker) -> str | None:
    async with storehouse(siege) as root:
        files = {INFO: b"{}", "data/x": b"x" * 60_000}
        assert not (await _begun(intruder, OWN, files, "own")).error
        order = {"dataset": "own", "upload": OWN}

        async def puts() -> None:
            for n in range(40):
                piece = {"upload": OWN, "path": "data/x", "offset": 0, "data": bytes([n]) * 60_000}
                await intruder.pack("data.put", piece)

        async def ends() -> list[Answer]:
            return [await intruder.call("data.commit", order) for _ in range(20)]

        _, answers = await asyncio.gather(puts(), ends())
        if any(not answer.error and answer.content.get("dataset") for answer in answers):
            return f"put in place while it was written: {answers}"
        return None if not (root / INTRUDER / "own").exists() else "it lies there"


@attack("Floods: tiny files, long lists, uploads begun and left, pieces of nothing, all at once.")
async def floods_of_pieces(siege: Siege, intruder: Attacker) -> str | None:
    async with storehouse(siege) as root:
        page = [{"path": f"f/{n}", "size": 1, "sha256": "0" * 64} for n in range(100)]

        def begin(upload: str, **more: Any) -> Awaitable[Answer]:
            return intruder.call("data.begin", {"dataset": "own", "upload": upload, "files": page, "last": True} | more)

        def put(n: int) -> Awaitable[Answer]:
            piece = {"upload": f"{n % 30:08x}", "path": f"f/{n % 100}", "offset": n % 3, "data": b"x"}
            return intruder.pack("data.put", piece)

        await _in_crowds(lambda n: begin(f"{n:08x}"), 30)
        await siege.served()
        begun = len(uploads.uploads(root / INTRUDER))
        # Those that begin at the same moment may pass each other; no later one may.
        if begun > UPLOADS + CROWD or not (await begin("ff" * 8)).error:
            return f"{begun} were begun, and another"
        await _in_crowds(put, 200)
        await siege.served()
        longest = [{"path": f"{n:03}" + "x" * 240, "size": 2**53, "sha256": "0" * 64} for n in range(100)]
        for number in (0, 1999, 2000, 2**53):
            await begin("ff" * 8, page=number, files=longest)
        if len(uploads.uploads(root / INTRUDER)) > begun:
            return "further ones"
        files = [path for path in (root / INTRUDER).rglob("f/*") if path.is_file()]
        if len(files) > 100 * begun or any(path.stat().st_size > 1 for path in files):
            return f"{len(files)} files"
        fine = await siege.victim.pack("data.put", {"upload": UPLOAD, "path": INFO, "offset": 4, "data": MARK.encode()[4:]})
        return None if fine.content["have"] == len(MARK) else f"the victim's own push: {fine}"
