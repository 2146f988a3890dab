"""The far end of `launcher/ssh.py`: starts this host's program, passes signals on, and ends it when the connection ends.

What to start comes over standard input, one JSON object a line, so that no shell touches arguments or environment and neither
can be read in a list of processes. First `{"cwd", "env", "argv", "end_seconds"}`, then `{"signal": n}` as often as wanted.
The end of the input means that the starter or the connection is gone: SIGTERM (the ranks save), `end_seconds`, then SIGKILL.
Standard library only, and no package around it: `python -I -S remote.py`
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

HELLO = b"dist-train host is ready: "  # with JSON behind it; whatever comes before is a login shell's
_COPY_SECONDS = 2.0
_CANNOT_START, _PORTS = 2, range(20000, 32000)  # (below the ports that systems hand out by themselves)


def free_port() -> int:
    """A port that nothing listens on at this moment and that the system gives nobody who does not ask for it."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return 0


def main() -> int:
    """The exit code of the program, 128+n where signal n ended it; 2 when it could not be started."""
    sys.stdout.buffer.write(HELLO + json.dumps({"port": free_port()}).encode() + b"\n")
    sys.stdout.flush()
    job = json.loads(sys.stdin.buffer.readline() or "null")
    if job is None:
        return 0
    env = {**os.environ, **job["env"], "DIST_TRAIN_LAUNCHER_PID": str(os.getpid())}
    guard = str(Path(__file__).resolve().with_name("guard.py"))  # the program dies with this process
    command = [sys.executable, "-I", "-S", guard, *job["argv"]]
    try:
        process = subprocess.Popen(
            command, cwd=job["cwd"], env=env, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        print(f"{error.filename}: {error.strerror}; the folder of the starter must exist on every host", file=sys.stderr)
        return _CANNOT_START
    assert process.stdout is not None and process.stderr is not None
    copies = [_in_background(_copy, source, sink) for source, sink in ((process.stdout, 1), (process.stderr, 2))]
    _in_background(_obey, process, float(job["end_seconds"]))
    code = process.wait()
    for copy in copies:  # a grandchild may hold the pipes open
        copy.join(_COPY_SECONDS)
    return code if code >= 0 else 128 - code


def _obey(process: subprocess.Popen[bytes], end_seconds: float) -> None:
    for line in sys.stdin.buffer:
        process.send_signal(json.loads(line)["signal"])
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(end_seconds)
    except subprocess.TimeoutExpired:
        process.kill()


def _copy(source: BinaryIO, sink: int) -> None:
    """Until the end, whether or not somebody still reads: ranks that save must not die of a broken pipe."""
    reader_left = False
    while data := os.read(source.fileno(), 65536):
        while data and not reader_left:
            try:
                data = data[os.write(sink, data) :]
            except OSError:
                reader_left = True


def _in_background(target, *arguments) -> threading.Thread:  # type: ignore[no-untyped-def]
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())  # without the interpreter's own end, which would wait for the thread that reads
