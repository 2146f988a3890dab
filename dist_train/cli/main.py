"""`dist-train COMMAND …`: a table of commands; each is imported when it is called, so that help answers at once."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys

from dist_train import __version__

COMMANDS = {
    "train": ("dist_train.cli.train", "train a model: starts its own ranks, or joins those of torchrun, srun or mpirun"),
    "launch": ("dist_train.cli.launch", "start any script on several ranks"),
    "data": ("dist_train.cli.data", "prepare token files ahead of a run"),
    "check": ("dist_train.cli.check", "show what a configuration holds before it runs"),
    "generate": ("dist_train.cli.generate", "write text from a trained run"),
}
BAD_INPUT, INTERRUPTED = 2, 130


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for what the user can put right (said in one message), 130 for Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else argv
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
