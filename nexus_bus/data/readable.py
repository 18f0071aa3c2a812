"""Whether a dataset that somebody brought can be read at all: `python -m nexus_bus.data.readable DIRECTORY MEMORY_BYTES`.

A process of its own, because its files are a stranger's and their readers are native code: what breaks or swells is this one.
It prints episodes, frames and version as JSON; or says on stderr which file is wrong, and ends with code REFUSED.
"""

import resource
import sys
from pathlib import Path

import msgspec

from nexus_bus.errors import NexusError

REFUSED = 3


class Readable(msgspec.Struct, frozen=True, kw_only=True):
    """What it holds."""

    episodes: int
    frames: int
    version: str


def look(root: Path) -> Readable:
    """Open a dataset, and find every file that it names.

    Raises:
        NotFound, BadMessage: what `reader.Dataset` says of it, or the film that is not there.
    """
    from nexus_bus.data.reader import Dataset
    from nexus_bus.errors import BadMessage

    dataset = Dataset(root)
    try:
        films = {film.path: number for number, one in enumerate(dataset.episodes) for film in one.films.values()}
        for path, number in films.items():
            if not dataset.layout.root.inside(path).is_file():
                raise BadMessage(f"there is no {path}, which episode {number} is in")
        return Readable(episodes=len(dataset.episodes), frames=len(dataset), version=dataset.version)
    finally:
        dataset.close()


def main(directory: str, memory: str) -> int:
    """See the module."""
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        found = look(Path(directory))
    except NexusError as error:
        sys.stderr.write(str(error))
        return REFUSED
    sys.stdout.write(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
