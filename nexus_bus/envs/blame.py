"""Where in somebody's code an error came from, in the words of whoever wrote it. Below child.py and conformance.py."""

import sys
import sysconfig
import traceback
from pathlib import Path

from nexus_bus.errors import NexusError

_OURS = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def place(error: BaseException) -> str:
    """` (arm.py, line 12, in step)`: the deepest frame that is neither ours nor a library's, else the deepest of a library.

    Empty where all frames are ours: what we refuse is nobody's mistake but of what it says.
    """
    origin = error.__cause__ if isinstance(error, NexusError) else error
    if origin is None or isinstance(origin, NexusError):
        return ""
    frames = [frame for frame in traceback.extract_tb(origin.__traceback__) if not frame.filename.startswith(("<", _OURS))]
    theirs = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    for frame in reversed(theirs or frames):
        return f" ({_short(frame.filename)}, line {frame.lineno}, in {frame.name})"
    return ""


def _short(file: str) -> str:
    """As it is imported: whoever wrote it knows where it lies, and nobody else needs to."""
    below = [root for root in sys.path if root and file.startswith(root.rstrip("/") + "/")]
    return file[len(max(below, key=len).rstrip("/")) + 1 :] if below else Path(file).name
