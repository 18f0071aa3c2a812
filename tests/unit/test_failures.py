"""What a process died of, from its exit code and its log."""

import json
import signal
from pathlib import Path

import pytest

from nexus_bus.failures import LONGEST, classify, ending, last_words


@pytest.mark.parametrize(
    ("code", "words", "cause"),
    [
        (1, "MemoryError", "memory"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "memory"),
        (1, "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory", "memory"),
        (-signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'", "memory"),
        (1, "FloatingPointError: loss is nan", "numerics"),
        (1, "ValueError: the loss is not finite", "numerics"),
        (-signal.SIGFPE, "", "numerics"),
        (1, "nexus_bus.errors.EnvironmentFault: simulator gave no answer to step within 20 s and was killed", "simulator"),
        (1, "mujoco.FatalError: gladLoadGL error", "simulator"),
        (1, "nexus_bus.errors.Unavailable: no NATS server with JetStream at nats://127.0.0.1:1", "broker"),
        (1, "ConnectionRefusedError: [Errno 111] Connect call failed", "broker"),
        (1, "KeyError: 'tenant'", "code"),
        (1, "", "code"),
        (-signal.SIGSEGV, "Fatal Python error: Segmentation fault", "code"),
        (-signal.SIGKILL, "", "killed"),
        (-signal.SIGTERM, "", "killed"),
    ],
)
def test_each_kind_of_failure_is_told_from_the_others(code: int, words: str, cause: str):
    assert classify(code, words) == cause


def test_the_kernel_says_whether_a_kill_was_for_want_of_memory():
    assert classify(-signal.SIGKILL, "", out_of_memory=True) == "memory"
    assert classify(1, "KeyError: 'a'", out_of_memory=True) == "code", "somebody else's"


def test_last_words_are_the_last_error_of_this_process(tmp_path: Path):
    log = tmp_path / "trainer-0.log"
    lines = [
        {"level": "error", "event": "worker failed", "exception": "Traceback\n  File\nKeyError: 'of the one before'"},
        {"level": "info", "event": "joined"},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    since = log.stat().st_size
    assert last_words(log) == "KeyError: 'of the one before'"
    assert last_words(log, since) == "", "a process that said nothing has no words"
    with log.open("a") as file:
        file.write(json.dumps({"level": "error", "event": "step failed", "error": "loss is nan"}) + "\n")
        file.write(json.dumps({"level": "info", "event": "draining"}) + "\n")
    assert last_words(log, since) == "loss is nan"
    with log.open("a") as file:
        file.write("Fatal Python error: Segmentation fault\n" + "x" * 5000 + "\n\n")
    assert last_words(log, since) == "Fatal Python error: Segmentation fault", "not what the interpreter lists below it"
    with log.open("a") as file:
        file.write(
            'Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "arm.py", line 3 in drive\n'
        )
        file.write('  File "child.py", line 9 in main\n\nExtension modules: msgspec._core, numpy.random.mtrand\n')
    assert last_words(log, since) == 'Fatal Python error: Aborted, File "arm.py", line 3 in drive'
    log.write_text("x" * 5000 + "\n\n")
    assert last_words(log) == "x" * LONGEST
    assert last_words(tmp_path / "nowhere.log") == ""


def test_an_ending_is_told_in_words():
    assert ending(1) == "ended with code 1"
    assert ending(-9) == "ended by SIGKILL"
    assert ending(-99) == "ended by signal 99"
