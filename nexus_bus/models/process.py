"""Process settings of whoever loads torch (rollout never does; inference and trainer do). Called before torch is imported."""

import os
import sys

SETTINGS = {
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads on shared cores cost 8 times as much
    "MKL_CBWR": "AUTO,STRICT",  # bit-equal products whatever the shape of the batch and the number of threads
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}

_in_force = 0  # threads, once settings were made


def settings(threads: int = 1) -> None:
    """Put the numeric settings in force. One thread a process, since several processes share the cores.

    Raises:
        RuntimeError: torch is already loaded under other settings, so these would not be seen.
    """
    global _in_force  # noqa: PLW0603 - of the process, as what it stands for
    if "torch" in sys.modules and _in_force == threads:  # a spare has loaded it under the same ones
        return
    if "torch" in sys.modules:
        raise RuntimeError("models.process.settings() came after torch was imported: call it first in the process")
    _in_force = threads
    os.environ.update(SETTINGS)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
