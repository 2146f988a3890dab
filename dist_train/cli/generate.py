"""`dist-train generate`: text from the newest checkpoint of a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch

    from dist_train.config.schema import Config
    from dist_train.model.transformer import Transformer

EXAMPLES = """examples
  dist-train generate runs/2026-01-31_12-00-00 --prompt 'def main(' --tokens 100
  dist-train generate runs/mine --prompt 'Once upon' --temperature 0.7 --top-p 0.9 --seed 3
"""


def main(argv: list[str]) -> int:
    """Print prompt and continuation; notes go to stderr. Raises ConfigError (also CheckpointError, one of its kind)."""
    options = _parser().parse_args(argv)
    _check(options)

    from dist_train.config.compose import load
    from dist_train.data.tokenizer import Tokenizer
    from dist_train.model.generate import generate

    run_dir = _run_folder(options.run_dir)
    config = load(run_dir / "config.yaml")
    tokenizer = Tokenizer.load(run_dir / "tokenizer.json")
    model, path = load_model(config, run_dir, _device(options.device))
    print(f"{path}: {options.tokens} tokens at temperature {options.temperature:g}", file=sys.stderr)

    prompt = tokenizer.encode(options.prompt)
    if len(prompt) > config.model.max_positions:
        print(f"the prompt has {len(prompt)} tokens: its last {config.model.max_positions} are used", file=sys.stderr)
    drawing = options.temperature, options.top_p, options.seed
    new = generate(model, prompt, options.tokens, *drawing, tokenizer.eos, vocab=tokenizer.vocab_size)
    print(tokenizer.decode(prompt + new))  # together: a character may be cut between them
    return 0


def load_model(config: Config, run_dir: Path, device: torch.device) -> tuple[Transformer, Path]:
    """The model in fp32 with the weights of the run's newest whole checkpoint, and that checkpoint. Raises ConfigError."""
    from dist_train.checkpoint import Piece, find, load
    from dist_train.config.compose import ConfigError
    from dist_train.model.build import empty_model

    path = find(run_dir / "checkpoints", "auto")
    if path is None:
        raise ConfigError(f"{run_dir}: holds no whole checkpoint; train it to its end, or set checkpoint.every.")
    model = empty_model(config).to_empty(device="cpu")
    model.tie()
    load(path, [Piece.whole(f"model/{name}", parameter) for name, parameter in model.named_parameters()])
    return model.to(device), path


def _check(options: argparse.Namespace) -> None:
    """Refuse what could never be generated, before a model is loaded. Raises ConfigError."""
    from dist_train.config.compose import ConfigError

    try:
        options.prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"--prompt {options.prompt!a}: is not UTF-8; give text in UTF-8.") from None
    if options.tokens < 0:
        raise ConfigError(f"--tokens {options.tokens}: cannot be negative; give how many new tokens there may be.")
    if not 0.0 <= options.temperature < float("inf"):
        raise ConfigError(f"--temperature {options.temperature:g}: must be 0 (the likeliest token) or a number above it.")
    if not 0.0 < options.top_p <= 1.0:
        raise ConfigError(f"--top-p {options.top_p:g}: must be above 0 and at most 1, which keeps every token.")
    if not 0 <= options.seed < 2**64:
        raise ConfigError(f"--seed {options.seed}: must be between 0 and 2^64 - 1.")


def _run_folder(text: str) -> Path:
    from dist_train.config.compose import ConfigError

    run_dir = Path(text).expanduser()
    if not run_dir.is_dir():
        raise ConfigError(f"{text}: no such run folder; give the folder that `dist-train train` printed.")
    for name in ("config.yaml", "tokenizer.json"):
        if not (run_dir / name).is_file():
            raise ConfigError(f"{text}: holds no {name}, so it is no run folder; give one that `dist-train train` made.")
    return run_dir


def _device(name: str) -> torch.device:
    import torch

    from dist_train.config.compose import ConfigError

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu.")
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else "cpu" if name == "auto" else name)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        from dist_train.config.compose import ConfigError

        raise ConfigError(f"{message}. See: dist-train generate --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dist-train generate",
        description="Write text from the newest checkpoint of a run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what to go on from; empty: the start of a document")
    parser.add_argument("--tokens", type=int, default=120, metavar="N", help="at most so many new tokens (default 120)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest token (default 0.8)")
    parser.add_argument("--top-p", type=float, default=0.95, metavar="P", help="probability kept when drawing (default 0.95)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws (default 0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser
