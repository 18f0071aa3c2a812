"""What was probably meant: the end of a sentence about a name that does not exist."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'? There are …`, or `; there are …` where nothing is near."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1)
    listed = f"there are {', '.join(names)}" if names else "there are none"
    return f"; did you mean {near[0]!r}? {listed[0].upper()}{listed[1:]}" if near else f"; {listed}"
