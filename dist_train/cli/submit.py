"""`dist-train submit [--dry-run] [hydra overrides]`: what `dist-train train` would do, as a job of Slurm (docs/clusters.md).

The script and all output go to the run folder, which is fixed here, so that a job that comes back goes on in it. With -m the
jobs of the sweep are one array. Keys below `slurm.` say what is asked of the cluster. Prints the number of the job.

  dist-train submit launch.nodes=2 mesh.dp=16 slurm.gpus_per_node=8 slurm.time=24:00:00 slurm.partition=gpu run.dir=runs/big
  dist-train submit --dry-run …     the script, on standard output; nothing is made or submitted
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from dist_train.cli.jobs import MULTIRUN, each_job
from dist_train.cli.train import for_this_job
from dist_train.config import check
from dist_train.config.compose import ConfigError
from dist_train.config.schema import Config
from dist_train.launcher import folder, slurm
from dist_train.launcher.report import OK

_DRY_RUN = "--dry-run"
_SBATCH_SECONDS = 120


def main(argv: list[str]) -> int:
    """Exit code 0 when the job was submitted or printed; raises ConfigError for what cannot run, also in Slurm's own words."""
    if argv in (["-h"], ["--help"]):
        print(__doc__)
        return OK
    words = [word for word in argv if word != _DRY_RUN]
    sweep = any(word in words for word in MULTIRUN)
    tasks: list[slurm.Task] = []

    def collect(config: Config) -> int:
        from hydra.core.hydra_config import HydraConfig

        given = list(HydraConfig.get().overrides.task) if sweep else words
        tasks.append(slurm.Task(for_this_job(config), given))
        return OK

    each_job(words, collect)
    if not tasks:  # one of hydra's own options, such as --cfg, has had its answer
        return OK
    world_size = check.world_size(tasks[0].config, slurm.gpus(tasks[0].config))
    for task in tasks:
        check.require(task.config, world_size, slurm.problems(tasks, world_size) if task is tasks[0] else ())
        folder.refuse_early(task.config)
    script = _script(tasks, world_size, _given_folder(tasks, sweep) or folder.fresh_name(), sweep)
    if _DRY_RUN in argv:
        sys.stdout.buffer.write(os.fsencode(script))
        return OK
    return _submit(tasks, world_size, sweep)


def _given_folder(tasks: list[slurm.Task], sweep: bool) -> Path | None:
    given = tasks[0].config.run.dir
    if not given:
        return None
    path = Path(given).expanduser()
    return path.parent if sweep else path  # (jobs of a sweep have the subfolders of their numbers)


def _script(tasks: list[slurm.Task], world_size: int, run_dir: Path, sweep: bool) -> str:
    run_dir = run_dir.absolute()
    fixed = []
    for number, task in enumerate(tasks):
        words = [word for word in task.arguments if not word.startswith("run.dir=")]
        where = run_dir / str(number) if sweep else run_dir
        fixed.append(slurm.Task(task.config, [*words, f"run.dir={_hydra_word(str(where))}"]))
    contained = bool(tasks[0].config.slurm.container)
    program = ["dist-train", "train"] if contained else [sys.executable, "-m", "dist_train.cli.main", "train"]
    return slurm.render(fixed, world_size, run_dir, program, sweep)


def _hydra_word(value: str) -> str:
    """A value that hydra's grammar reads as this text, whatever is in it."""
    if re.fullmatch(r"[\w./@%+-]+", value):
        return value
    quoted = value.replace("\\'", "\\\\'").replace("'", "\\'")
    return f"'{quoted}'"


def _submit(tasks: list[slurm.Task], world_size: int, sweep: bool) -> int:
    if shutil.which("sbatch") is None:
        raise ConfigError("sbatch: not on PATH; submit where Slurm's commands are, or look at the script with --dry-run.")
    run_dir = _given_folder(tasks, sweep)
    made = run_dir is None or not run_dir.exists()
    if run_dir is None:
        run_dir = folder.fresh()
    script = _script(tasks, world_size, run_dir, sweep)
    for path in [run_dir, *(run_dir / str(number) for number in range(len(tasks)) if sweep)]:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = run_dir / "job.sbatch"
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", errors="surrogateescape") as out:
        out.write(script)
    done = subprocess.run(
        ["sbatch", "--parsable", str(file)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SBATCH_SECONDS
    )
    if done.returncode != OK:
        if made:
            shutil.rmtree(run_dir)
        raise ConfigError(f"sbatch refused the job: {done.stderr.strip() or f'exit code {done.returncode}'}")
    print(f"run folder: {run_dir}", file=sys.stderr)
    print(done.stdout.strip().partition(";")[0])
    return OK
