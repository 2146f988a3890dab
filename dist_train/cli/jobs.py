"""What `dist-train train` and `submit` share: hydra's arguments, and the jobs that they make."""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr

from omegaconf import DictConfig

from dist_train.config import compose
from dist_train.config.compose import ConfigError
from dist_train.config.schema import Config
from dist_train.launcher.report import OK

MULTIRUN = ("-m", "--multirun")


def each_job(argv: list[str], run: Callable[[Config], int]) -> int:
    """Call `run` with the config of these arguments, or with each of a multirun until one does not return 0; the last code.

    Inside `run`, `hydra.core.hydra_config.HydraConfig` knows the job. Raises ConfigError.
    """
    import hydra

    compose.register()
    outcome: list[int | ConfigError] = []

    @hydra.main(config_path=str(compose.configs_dir()), config_name="config", version_base="1.3")
    def job(node: DictConfig) -> None:
        # Exceptions do not leave this function: hydra would add lines of its own to them.
        if any(result != OK for result in outcome):
            return
        try:
            outcome.append(run(compose.to_config(node)))
        except ConfigError as error:
            outcome.append(error)

    with _hydra_arguments(argv):
        _refuse_options()
        try:
            job()
        except BrokenPipeError:
            raise
        except Exception as error:
            raise compose.translate(error) from error
    for result in outcome:
        if isinstance(result, ConfigError):
            raise result
        if result != OK:
            return result
    return OK


def _refuse_options() -> None:
    """Options that hydra does not know, in one line: it would print all that it knows first. Raises ConfigError."""
    from hydra._internal.utils import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    with redirect_stderr(io.StringIO()) as said:
        try:
            parser.parse_args()
        except SystemExit as end:
            if not end.code:
                raise  # --version
            complaint = said.getvalue().strip().rpartition("error: ")[2]
            raise ConfigError(f"{complaint}. All options: dist-train train --hydra-help") from None


@contextmanager
def _hydra_arguments(argv: list[str]) -> Iterator[None]:
    """What `hydra.main` reads from the process: its arguments, and the wish that it raises instead of printing."""
    before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    with tempfile.TemporaryDirectory(prefix="dist_train_") as scratch:
        swept = [f"hydra.sweep.dir={scratch}"] if any(word in argv for word in MULTIRUN) else []  # it keeps a file there
        flags = [word for word in argv if word in MULTIRUN]  # (argparse wants the other words in one piece)
        sys.argv = ["dist-train train", *flags, *(word for word in argv if word not in MULTIRUN), *swept]
        os.environ["HYDRA_FULL_ERROR"] = "1"
        try:
            yield
        finally:
            sys.argv = before
            if full_error is None:
                del os.environ["HYDRA_FULL_ERROR"]
            else:
                os.environ["HYDRA_FULL_ERROR"] = full_error
