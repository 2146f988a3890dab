"""What runs first in the process of every rank, before the rank's program replaces it.

The kernel is asked to kill this process when the launcher dies (the request survives `exec`), and output goes to the
rank's own log. Nothing but the standard library is loaded, so this costs milliseconds: `python -I -S guard.py PROGRAM ARG...`
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LAUNCHER = "DIST_TRAIN_LAUNCHER_PID"  # who must be alive
OUT, ERR = "DIST_TRAIN_LOG_OUT", "DIST_TRAIN_LOG_ERR"  # files; absent: the terminal of the launcher
PR_SET_PDEATHSIG = 1


def die_with_launcher(launcher: int) -> None:
    """SIGKILL this process when its parent, the launcher, dies; at once when that has happened already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(128 + signal.SIGKILL)


def redirect(out: str, err: str) -> None:
    """Append standard output and error to these files (private to the user); an empty name leaves a stream where it is."""
    opened = {name: os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for name in {out, err} if name}
    for name, stream in ((out, 1), (err, 2)):
        if name:
            os.dup2(opened[name], stream)
    for descriptor in opened.values():
        os.close(descriptor)


def main(argv: list[str]) -> int:
    die_with_launcher(int(os.environ.pop(LAUNCHER)))
    redirect(os.environ.pop(OUT, ""), os.environ.pop(ERR, ""))
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would hand that on
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"{argv[0]}: cannot be started: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
