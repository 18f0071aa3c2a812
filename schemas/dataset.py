"""Datasets that tenants bring: tenant → gateway → environment worker, as requests. `nexus data push | list | drop`.

A push is three things, each of which may be repeated at any time: the list of its files in pages (`data.begin`, whose answers
say how much of each is there), their bytes in pieces (`data.put`), and the order to check them and to put the whole in place
(`data.commit`).
"""

from typing import Annotated

from msgspec import Meta

from schemas.api import CHUNK_BYTES, Upload
from schemas.base import Count, Message, Name, Sha256

FILES = 20_000  # of one dataset
PATH = 300  # characters of a file's
PAGE_FILES = 100  # of one page of the list of files
PAGES = 2000
DATASETS_PAGE = 20  # whose files are counted for one answer

Path = Annotated[str, Meta(min_length=1, max_length=PATH, description="Of a file: below the dataset, parted by `/`.")]


class DatasetFile(Message, frozen=True, kw_only=True):
    """One file of a dataset."""

    path: Path
    size: Count
    sha256: Sha256


class DatasetBegin(Message, frozen=True, kw_only=True):
    """A page of the files that are to be sent; pages come in order, and with the last one the sending may begin.

    The same upload begun again goes on. What nobody sends anything of for a day is forgotten.
    """

    dataset: Name
    upload: Upload
    page: Annotated[int, Meta(ge=0, lt=PAGES)] = 0
    files: Annotated[list[DatasetFile], Meta(min_length=1, max_length=PAGE_FILES)]
    last: bool = False
    replace: bool = False  # a dataset of that name may be there


class DatasetAsked(Message, frozen=True, kw_only=True):
    """The same, from the gateway to an environment worker."""

    begin: DatasetBegin
    room: Count | None = None  # bytes that the tenant may still keep; None: no limit


class DatasetBegun(Message, frozen=True, kw_only=True):
    """How much is there."""

    have: list[Count]  # bytes of each file of the page, in its order
    done: bool = False  # this very upload lies in place already


class DatasetPut(Message, frozen=True, kw_only=True):
    """A piece of a file. It may come twice; what comes before the piece must be there."""

    upload: Upload
    path: Path
    offset: Count
    data: Annotated[bytes, Meta(max_length=CHUNK_BYTES)]


class DatasetHeld(Message, frozen=True, kw_only=True):
    """Bytes of that file that are there by now."""

    have: Count


class DatasetCommit(Message, frozen=True, kw_only=True):
    """Check what was sent, and put it in place."""

    dataset: Name
    upload: Upload
    replace: bool = False  # what lies there


class DatasetInfo(Message, frozen=True, kw_only=True):
    """A dataset that lies there."""

    dataset: str
    bytes: Count
    files: Count
    episodes: Count = 0  # as its metadata say; 0 where they do not
    frames: Count = 0
    version: str = ""  # of the LeRobot format
    time: str  # since when it lies there
    features: dict[str, list[Count]] = {}  # shapes of pictures [height, width, 3], state and action; empty: not known


class DatasetCommitted(Message, frozen=True, kw_only=True):
    """It lies in place; or, without it, it is still being checked: ask again."""

    dataset: DatasetInfo | None = None


class DatasetQuery(Message, frozen=True, kw_only=True):
    """A page of a tenant's datasets, by name; `after` is the `next` of the page before."""

    dataset: Annotated[str, Meta(max_length=300)] = ""  # only this one, as a job names it: `public/NAME`, too
    after: Annotated[str, Meta(max_length=300)] = ""
    limit: Annotated[int, Meta(ge=1, le=DATASETS_PAGE)] = DATASETS_PAGE


class DatasetUnfinished(Message, frozen=True, kw_only=True):
    """An upload that was begun."""

    dataset: Name
    upload: Upload
    sent: Count  # bytes
    bytes: Count  # in all
    time: str  # of the last piece


class DatasetPage(Message, frozen=True, kw_only=True):
    """Datasets by name, those recorded for jobs included; and, on the first page, what is not finished."""

    datasets: list[DatasetInfo]
    unfinished: list[DatasetUnfinished] = []
    next: str = ""  # empty: that was all


class DatasetDrop(Message, frozen=True, kw_only=True):
    """Take away a dataset, and what was sent of one of that name."""

    dataset: Name


class DatasetDropped(Message, frozen=True, kw_only=True):
    """It is gone."""

    bytes: Count


class DatasetRecord(Message, frozen=True, kw_only=True):
    """A pushed dataset in the registry, where its bytes count into what its tenant keeps."""

    tenant: Name
    dataset: Name
    upload: Upload
    mark: str  # what its files are known by: another one in its place has not this
    bytes: Count
    time: str
