"""Memory of a message is kept for the next one."""

import subprocess
import sys

import pytest

PICTURES = """
import resource
from nexus_bus import memory
memory.keep()
for _ in range(3):
    [b"x" * 150_000 for _ in range(8)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    [b"x" * 150_000 for _ in range(8)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_pictures_take_no_new_pages_from_the_system() -> None:
    faults = subprocess.run([sys.executable, "-c", PICTURES], check=True, capture_output=True, text=True, timeout=60).stdout
    assert int(faults) < 100  # and not one for each of the 30,000 pages
