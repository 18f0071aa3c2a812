"""A report as files: manifest.json, episodes.jsonl, protocol.toml, report.html and films/."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from nexus_bus.errors import Unavailable
from nexus_bus.evaluation.page import page
from nexus_bus.whole import whole
from schemas.evaluation import EvaluationEpisode, EvaluationFilm, Manifest, Protocol

ENDINGS = {"video/mp4": "mp4", "image/gif": "gif"}


def write(
    directory: Path, manifest: Manifest, episodes: Sequence[EvaluationEpisode], films: Mapping[str, EvaluationFilm]
) -> list[Path]:
    """Write a report, over one that is there; the files. Raises Unavailable if the disk refuses."""
    content: dict[str, bytes] = {
        "report.html": page(manifest, episodes, films).encode(),
        "manifest.json": msgspec.json.format(msgspec.json.encode(whole(manifest))) + b"\n",
        "episodes.jsonl": b"".join(msgspec.json.encode(whole(one)) + b"\n" for one in episodes),
        "protocol.toml": toml(manifest.protocol).encode(),
        **{f"films/{name}.{ENDINGS[film.media_type]}": film.data for name, film in sorted(films.items())},
    }
    try:
        for name, data in content.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)
    except OSError as error:
        raise Unavailable(f"{directory}: {error.strerror or error}") from error
    return [directory / name for name in content]


def toml(protocol: Protocol) -> str:
    """A protocol as the file that `nexus eval --protocol` reads."""
    given = {name: getattr(protocol, name) for name in protocol.__struct_fields__}
    options = given.pop("options")
    # What JSON writes of texts, numbers and lists of texts is TOML, too.
    lines = [f"{name} = {json.dumps(value)}" for name, value in given.items() if value not in (None, "", ())]
    lines += (
        ["", "[options]", *(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in options.items())] if options else []
    )
    return "\n".join(lines) + "\n"
