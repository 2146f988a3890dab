"""`dist-train COMMAND …`: a table of commands; each is imported when it is called, so that help answers at once."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import select
import sys

from dist_train import __version__

COMMANDS = {
    "train": ("dist_train.cli.train", "train a model: starts its own ranks, or joins those of torchrun, srun or mpirun"),
    "submit": ("dist_train.cli.submit", "train as a job of Slurm: write its script, and submit it"),
    "launch": ("dist_train.cli.launch", "start any script on several ranks"),
    "data": ("dist_train.cli.data", "prepare token files ahead of a run"),
    "check": ("dist_train.cli.check", "show what a configuration holds before it runs"),
    "plan": ("dist_train.cli.plan", "show a pipeline's bubble and memory before it runs, and draw its timeline"),
    "doctor": ("dist_train.cli.doctor", "check a node before a run, or under a launcher all of them, and say what to do"),
    "generate": ("dist_train.cli.generate", "write text from a trained run"),
}
BAD_INPUT, INTERRUPTED, NOBODY_READS = 2, 130, 141  # 130 and 141: as if SIGINT or SIGPIPE had ended the command


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for what the user can put right (said in one message), 130 for Ctrl-C.

    141, without a word, when whoever read the output has gone (`dist-train … | head`).
    """
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where it can still be answered for, and not while the interpreter ends
    except BrokenPipeError:
        closed = [number for number in (1, 2) if _nobody_reads(number)]
        if not closed:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in closed:  # what is left in the buffers goes there
            os.dup2(nowhere, number)
        return NOBODY_READS


def _nobody_reads(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"dist-train {__version__}")
        return 0
    name, *rest = arguments
    if name not in commands():
        close = difflib.get_close_matches(name, commands(), n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        print(f"dist-train {name}: no such command.{hint} All commands: {', '.join(commands())}", file=sys.stderr)
        return BAD_INPUT
    from dist_train.config.compose import ConfigError

    try:
        return importlib.import_module(COMMANDS[name][0]).main(rest)
    except ConfigError as error:
        print(f"dist-train {name}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def commands() -> dict[str, str]:
    """The commands of this installation and what each does, in the order of the help."""
    return {name: text for name, (module, text) in COMMANDS.items() if importlib.util.find_spec(module) is not None}


def _help() -> str:
    width = max(map(len, commands()))
    lines = [f"  {name.ljust(width)}  {text}" for name, text in commands().items()]
    return "\n".join(
        [
            "Train and fine-tune language models, from one CPU box to thousands of GPUs.",
            "",
            "usage: dist-train COMMAND …    (dist-train COMMAND --help says more)",
            "",
            *lines,
            "",
            "A first run: dist-train train mesh.dp=2",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
