"""The program of every rank that `dist-train train` starts: `python -m dist_train.launcher.rank RUN_DIR`."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from dist_train.config import compose
from dist_train.config.compose import ConfigError
from dist_train.launcher.report import BAD_INPUT

FAILED, INTERRUPTED = 1, 130


def main(argv: list[str]) -> int:
    """Train as the rank that the environment says, in the run folder `argv[0]`; the exit code of this rank."""
    faulthandler.enable()
    return guarded(Path(argv[0]), started_here=True)


def guarded(run_dir: Path, started_here: bool) -> int:
    """`run_rank` of the core, with every exception turned into an exit code and into words that somebody will see.

    `started_here`: our own launcher waits for this rank and shows its error file, so the terminal gets it once. Otherwise
    (torchrun, srun, mpirun) this rank prints it itself.
    """
    try:
        from dist_train.train.main import run_rank

        return run_rank(compose.load(run_dir / "config.yaml"), run_dir)
    except ConfigError as error:
        return _tell(run_dir, str(error), BAD_INPUT, started_here)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:
        return _tell(run_dir, traceback.format_exc(), FAILED, started_here)
    finally:
        # The work is done or lost; a signal now could only turn the code that says which into another one.
        for late in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(late, signal.SIG_IGN)


def _tell(run_dir: Path, text: str, code: int, started_here: bool) -> int:
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:  # the others' standard error is their log
        descriptor = os.open(run_dir / "logs" / "rank_00000.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as log:
            log.write(text.rstrip() + "\n")
    if rank != 0 or not started_here:
        print(text.rstrip(), file=sys.stderr, flush=True)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        _write_error_file(Path(file), text)
    return code


def _write_error_file(path: Path, text: str) -> None:
    # torch's format, so that any elastic launcher can read it; renamed into place, since half a file stops the agent
    last = text.rstrip().splitlines()[-1]
    message = {"message": last, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(json.dumps({"message": message}))
    aside.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
