"""How a process that moves pictures deals with the system's allocator."""

import contextlib
import ctypes

BLOCK = 32 << 20  # bytes; the largest that glibc lets one set
SPARE = 64 << 20  # bytes of freed memory that are kept

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of malloc.h


def keep() -> None:
    """Keep freed memory for the next message. As it comes, glibc gives anything above 128 KiB back at once, and a picture of
    224 px costs more page faults than copies: 0.1 ms each time that it is put together. Elsewhere nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        malloc = ctypes.CDLL(None).mallopt
        malloc(_MMAP_THRESHOLD, BLOCK)
        malloc(_TRIM_THRESHOLD, SPARE)
