"""What the end of a rank means, in words. Pure."""

from __future__ import annotations

import signal

OK = 0
BAD_INPUT = 2  # a configuration or an input that the user can put right
LOST = 74  # a node of several stopped answering: start it again and it goes on from the last checkpoint (EX_IOERR)
PREEMPTED = 75  # stopped on request after saving: start it again and it goes on (EX_TEMPFAIL of sysexits.h)

_SIGNALS = {
    signal.SIGKILL: "often out of memory",
    signal.SIGBUS: "often a full /dev/shm or a file cut short under a memory map",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up: see the lines above it",
    signal.SIGFPE: "an arithmetic fault in native code",
    signal.SIGILL: "an instruction that this processor lacks",
    signal.SIGTERM: "somebody asked it to stop",
    signal.SIGINT: "interrupted",
    signal.SIGHUP: "its terminal went away",
}
_CODES = {
    1: "an error that nothing caught",
    BAD_INPUT: "a bad configuration or input",
    LOST: "a node was lost",
    PREEMPTED: "stopped after saving; start it again to resume",
    126: "the program may not be executed",
    127: "the program was not found",
}


def exit_code(status: int) -> int:
    """The shell's code of a process status: `-n`, ended by signal n, becomes 128+n."""
    return status if status >= 0 else 128 - status


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def meaning(status: int) -> str:
    """`failed with exit code 7`, `was killed by SIGKILL (often out of memory)`."""
    if status < 0:
        hint = _SIGNALS.get(signal.Signals(-status)) if -status in signal.valid_signals() else None
        return f"was killed by {signal_name(-status)}" + (f" ({hint})" if hint else "")
    hint = _CODES.get(status)
    return f"failed with exit code {status}" + (f" ({hint})" if hint else "")


def failure(rank: int, status: int, lines: list[str], log: str = "") -> str:
    """The message about the first rank that failed: which, how, its last words, and the file that holds the rest."""
    text = f"dist-train: rank {rank} {meaning(status)}; exit code of the job: {exit_code(status)}"
    if lines:
        text += f"\nlast lines of rank {rank}:\n" + "\n".join(f"  {line}" for line in lines)
    return text + (f"\nits log: {log}" if log else "")
