"""A job of Slurm from a config: the scripts of launch/slurm with the lines between their marks written anew. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dist_train.config.compose import ConfigError
from dist_train.config.problem import Problem
from dist_train.config.schema import Config

BEGIN, END = "# >>> ", "# <<<\n"
KILL_SECONDS = 90  # beyond the grace of ranks, for what launchers do before and after it
_WORD = re.compile(r"[^\s\x00-\x1f\x7f]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MEMORY = re.compile(r"[0-9]+[KMGT]?", re.IGNORECASE)
_GPUS = re.compile(r"(?:[A-Za-z0-9_.-]+:)?([1-9][0-9]*)")
_UNLIMITED = ("0", "UNLIMITED", "INFINITE")
_TIMES = (
    re.compile(r"(?P<m>\d+)(?::(?P<s>\d+))?", re.ASCII),
    re.compile(r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)", re.ASCII),
    re.compile(r"(?P<d>\d+)-(?P<h>\d+)(?::(?P<m>\d+)(?::(?P<s>\d+))?)?", re.ASCII),
)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_MOST_SIGNAL_SECONDS = 65535  # Slurm's own bound
_OURS = {  # options that follow from other keys
    **dict.fromkeys(("--nodes", "-N"), "launch.nodes"),
    **dict.fromkeys(("--ntasks", "-n", "--ntasks-per-node"), "slurm.tasks"),
    **dict.fromkeys(("--output", "-o", "--error", "-e", "--open-mode"), "run.dir, where the output goes"),
    **dict.fromkeys(("--array", "-a"), "-m, which makes an array of a sweep"),
    **dict.fromkeys(("--requeue", "--no-requeue"), "slurm.requeue"),
    **dict.fromkeys(("--gpus-per-node", "--gpus", "-G", "--gres"), "slurm.gpus_per_node"),
    **dict.fromkeys(("--cpus-per-task", "-c"), "slurm.cpus_per_task"),
    **dict.fromkeys(("--time", "-t"), "slurm.time"),
    **dict.fromkeys(("--partition", "-p"), "slurm.partition"),
    **dict.fromkeys(("--account", "-A"), "slurm.account"),
    **dict.fromkeys(("--constraint", "-C"), "slurm.constraint"),
    **{f"--{name}": f"slurm.{name}" for name in ("qos", "reservation", "exclusive")},
    "-q": "slurm.qos",
    "--mem": "slurm.memory",
    "--signal": "slurm.signal_seconds",
}


@dataclass(frozen=True)
class Task:
    """One job, or one of an array: its config, and the arguments of `dist-train train` that make it, byte for byte."""

    config: Config
    arguments: list[str]


def templates_dir() -> Path:
    """The folder of scripts: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "launch" / "slurm"
    return inside if inside.is_dir() else package.parent / "launch" / "slurm"


def gpus(config: Config) -> int:
    """GPUs of a node that the job asks for; 0 where it asks for none (or for what `problems` refuses)."""
    match = _GPUS.fullmatch(config.slurm.gpus_per_node)
    return int(match[1]) if match else 0


def seconds(time: str) -> int | None:
    """The seconds of Slurm's time limit, None for no limit. Raises ValueError for what Slurm would not take."""
    if time.upper() in _UNLIMITED:
        return None
    for pattern in _TIMES:
        if match := pattern.fullmatch(time):
            return sum(int(value) * _SECONDS[unit] for unit, value in match.groupdict(default="0").items())
    raise ValueError(time)


def problems(tasks: list[Task], world_size: int) -> Iterator[Problem]:
    """What stands against submitting these tasks, of which each has `world_size` ranks."""
    config = tasks[0].config
    slurm, launch = config.slurm, config.launch
    if slurm.tasks not in ("node", "rank"):
        yield Problem("slurm.tasks", slurm.tasks, "one of node, rank", "set slurm.tasks=node")
    if launch.kind != "local":
        yield Problem("launch.kind", launch.kind, "Slurm starts the ranks of its own nodes", "set launch.kind=local")
    for name in ("partition", "account", "qos", "reservation", "constraint"):
        value = getattr(slurm, name)
        if value and not _WORD.fullmatch(value):
            yield Problem(f"slurm.{name}", repr(value), "is one word", "write it as Slurm shows it")
    if slurm.memory and not _MEMORY.fullmatch(slurm.memory):
        yield Problem("slurm.memory", slurm.memory, "a number with K, M, G or T", "set slurm.memory=200G")
    if slurm.gpus_per_node and not _GPUS.fullmatch(slurm.gpus_per_node):
        yield Problem("slurm.gpus_per_node", slurm.gpus_per_node, "a number, or type:number", "set it to 8, or h100:8")
    if slurm.cpus_per_task < 0:
        yield Problem("slurm.cpus_per_task", slurm.cpus_per_task, "at least 0", "set 0 for one for each rank")
    for word in slurm.extra:
        name = re.split(r"[=\s]", word, maxsplit=1)[0]
        if not word.startswith("-") or _CONTROL.search(word):
            yield Problem("slurm.extra", repr(word), "an option of sbatch in one line", 'write it as ["--nice=100"]')
        elif known := _OURS.get(name) or _OURS.get(name[:2] if not name.startswith("--") else ""):
            yield Problem("slurm.extra", word, "is written from another key", f"use {known}")
    yield from _limits(config)
    per_node = world_size // launch.nodes
    if config.launch.device == "cuda" and 0 < gpus(config) < per_node:
        rule = f"fewer than the {per_node} ranks of a node"
        yield Problem("slurm.gpus_per_node", slurm.gpus_per_node, rule, f"set slurm.gpus_per_node={per_node}")
    if slurm.requeue and config.checkpoint.resume == "never":
        rule = "a job that comes back would refuse its own run folder"
        yield Problem("checkpoint.resume", "never", rule, "set checkpoint.resume=auto, or slurm.requeue=false")


def _limits(config: Config) -> Iterator[Problem]:
    slurm, limit = config.slurm, None
    if slurm.time:
        try:
            limit = seconds(slurm.time)
        except ValueError:
            remedy = "write minutes, HH:MM:SS, D-HH or D-HH:MM:SS, as slurm.time=24:00:00"
            yield Problem("slurm.time", slurm.time, "not a time as Slurm writes it", remedy)
    if not 0 <= slurm.signal_seconds <= _MOST_SIGNAL_SECONDS:
        yield Problem("slurm.signal_seconds", slurm.signal_seconds, f"0 to {_MOST_SIGNAL_SECONDS}", "set 300")
    elif limit is not None and limit <= slurm.signal_seconds:
        rule = f"no time is left before slurm.time={slurm.time}"
        yield Problem("slurm.signal_seconds", slurm.signal_seconds, rule, "set a longer slurm.time or a smaller value")


def render(tasks: list[Task], world_size: int, folder: Path, program: list[str], sweep: bool) -> str:
    """The script: of one job in `folder`, or of a `sweep`'s array, whose tasks have the folders `folder`/0, /1 …

    `program` comes before the arguments of a task. Raises ConfigError for tasks that one allocation does not fit.
    """
    options = _options(tasks[0].config, world_size, folder, len(tasks) if sweep else None)
    for number, task in enumerate(tasks):
        if sweep and _options(task.config, world_size, folder, len(tasks)) != options:
            raise ConfigError(f"-m: jobs 0 and {number} differ in what they ask for, and an array is one request; submit each.")
    slurm = tasks[0].config.slurm
    lines = [f"#SBATCH {_sbatch_word(option)}" for option in options]
    lines += [f"program={_array(program)}", f"container={_array(slurm.container)}"]
    if sweep:
        lines.append("case $SLURM_ARRAY_TASK_ID in")
        lines += [f"{number}) arguments={_array(task.arguments)} ;;" for number, task in enumerate(tasks)]
        lines.append("esac")
    else:
        lines.append(f"arguments={_array(tasks[0].arguments)}")
    limit = seconds(slurm.time) if slurm.time else None
    lines.append(f"watchdog={0 if limit is None else limit - slurm.signal_seconds // 4}")
    lines.append(f"patience={round(tasks[0].config.launch.grace_seconds) + KILL_SECONDS}")
    lines.append(f"requeue={'yes' if slurm.requeue else 'no'}")
    text = (templates_dir() / f"{'array' if sweep else slurm.tasks}.sbatch").read_text()
    head, begin, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    return f"#!/bin/bash\n{begin}written by dist-train submit\n" + "\n".join(lines) + f"\n{END}{tail}"


def _options(config: Config, world_size: int, folder: Path, count: int | None) -> list[str]:
    slurm, nodes = config.slurm, config.launch.nodes
    per_node = world_size // nodes
    inside = str(folder).replace("%", "%%")
    output = f"{inside}/slurm-%j.out" if count is None else f"{inside}/%a/slurm-%A_%a.out"
    values = {
        "job-name": "dist_train",
        "output": output,
        "open-mode": "append",
        "array": f"0-{count - 1}" if count is not None else "",
        "nodes": nodes,
        "ntasks-per-node": 1 if slurm.tasks == "node" else per_node,
        "cpus-per-task": slurm.cpus_per_task or (per_node if slurm.tasks == "node" else 1),
        "gpus-per-node": slurm.gpus_per_node,
        "mem": slurm.memory,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "constraint": slurm.constraint,
        "time": slurm.time,
        "signal": f"USR1@{slurm.signal_seconds}" if slurm.signal_seconds else "",
    }
    flags = ["--exclusive"] * slurm.exclusive + ["--requeue" if slurm.requeue else "--no-requeue"]
    return [f"--{name}={value}" for name, value in values.items() if value != ""] + flags + slurm.extra


def _array(words: list[str]) -> str:
    return f"({' '.join(map(_bash_word, words))})"


def _bash_word(word: str) -> str:
    """This word, byte for byte, in a bash script of lines that sbatch takes (it refuses carriage returns)."""
    if not _CONTROL.search(word):
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", plain) + "'"


def _sbatch_word(option: str) -> str:
    """sbatch reads its lines by rules of its own: spaces end a word, # begins a comment, quotes and backslashes quote."""
    name, equals, value = option.partition("=")
    if re.fullmatch(r"[\w@%+=:,./|&*\[\]()~^-]*", value):
        return option
    return f"{name}{equals}" + '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
