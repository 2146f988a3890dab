"""What it takes to start many ranks: operations on the store they meet in, files opened, seconds. Counts are of the real code.

    python benchmarks/starts.py --ranks 2,4,8             operations on the store by phase, and what 1024 ranks would need
    python benchmarks/starts.py --files                   files a rank opens and looks for until its first step, modules
    python benchmarks/starts.py --seconds --ranks 1,2,4   from the command to the first step

Ranks are forked from one process that has imported torch, so that counting eight of them costs little more than one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dist_train.launcher.remote import free_port

TINY = [
    *("model.layers=2", "model.hidden=32", "model.heads=2", "model.kv_heads=2", "model.ffn=32", "model.vocab=53"),
    *("data=synthetic", "data.synthetic_documents=64", "train.seq_len=16", "train.global_batch=16", "train.micro_batch=1"),
    *("train.steps=1", "train.eval_every=0", "checkpoint.every=0", "observe.sample_tokens=0", "observe.tensorboard=false"),
    "launch.device=cpu",
]
CURVE = (8, 64, 256, 1024)


class CountingStore:
    """Made a subclass of torch's Store on first use: passes every operation on and counts it under the phase of the moment."""

    phase = "other"
    counts: Counter[tuple[str, str]] = Counter()

    def __new__(cls, inner: Any) -> Any:
        import torch.distributed as dist

        def count(name: str) -> Callable[..., Any]:
            def call(self: Any, *arguments: Any) -> Any:
                CountingStore.counts[CountingStore.phase, name] += 1
                answer = getattr(self.inner, name)(*arguments)
                moved = [arguments[1]] if name == "set" else answer if name == "multi_get" else [answer] if name == "get" else []
                CountingStore.counts[CountingStore.phase, "bytes"] += sum(map(len, moved))
                return answer

            return call

        names = ("set", "get", "add", "wait", "check", "compare_set", "delete_key", "append", "multi_get", "multi_set")
        others = {"has_extended_api": lambda self: True, "clone": lambda self: self}
        kind = type("Counting", (dist.Store,), {**others, **{name: count(name) for name in names}})
        store = kind()
        store.inner = inner
        return store


def degrees(layout: str, ranks: int) -> dict[str, int]:
    """Of a mesh: those named in the layout, and dp takes the rest."""
    named = {word.split("=")[0]: int(word.split("=")[1]) for word in layout.split() if "=" in word}
    return {**named, "dp": ranks // math.prod(named.values())}


def count_rank(rank: int, ranks: int, port: int, layout: str) -> dict[str, dict[str, int]]:
    """Join as one rank, with a counting store under everything; operations by phase and kind."""
    import torch.distributed as dist

    from dist_train.mesh.mesh import ParallelMesh

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    real_store, real_init = dist.TCPStore, dist.init_process_group
    kept = []

    def counting(*arguments: Any, **options: Any) -> Any:
        kept.append(CountingStore(real_store(*arguments, **options)))  # torch holds its C++ half alone
        return kept[-1]

    def init(*arguments: Any, **options: Any) -> None:
        CountingStore.phase = "world"
        real_init(*arguments, **options)
        CountingStore.phase = "groups"

    dist.TCPStore, dist.init_process_group = counting, init
    CountingStore.counts.clear()
    mesh = ParallelMesh.from_environment(**degrees(layout, ranks), device="cpu", timeout_seconds=60.0)
    found: dict[str, dict[str, int]] = {}
    for (phase, name), number in sorted(CountingStore.counts.items()):
        found.setdefault(phase, {})[name] = number
    CountingStore.phase = "end"
    dist.barrier()
    mesh.close()
    return found


def forked(ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work(rank, ranks, port, *arguments)` on ranks that are copies of this process; what they return, in order."""
    import torch.distributed as dist

    port = free_port()
    assert dist.is_available()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    Path(folder, f"{rank}.json").write_text(json.dumps(work(rank, ranks, port, *arguments)))
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            raise SystemExit(f"starts.py: ranks ended with {statuses}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def count(layout: str, ranks: int) -> dict[str, Any]:
    """Operations of every rank: by phase and kind for the busiest, and their sums."""
    found = forked(ranks, count_rank, layout)
    moved = sum(kinds.pop("bytes", 0) for each in found for kinds in each.values())
    sums = [sum(number for kinds in each.values() for number in kinds.values()) for each in found]
    busiest = found[sums.index(max(sums))]
    return {"layout": layout, "ranks": ranks, "per_rank": max(sums), "total": sum(sums), "bytes": moved, "phases": busiest}


def at_scale(rows: list[dict[str, Any]], ranks: int) -> tuple[float, float]:
    """Operations and bytes in all, from two counts: operations as a power of the ranks; of bytes, each rank reads N addresses of
    a group, and such an address of gloo's is as long as constant + N: N²(a + bN)."""
    small, large = rows[-2:]
    power = math.log(large["total"] / small["total"]) / math.log(large["ranks"] / small["ranks"])
    each = [row["bytes"] / row["ranks"] ** 2 for row in (small, large)]
    slope = (each[1] - each[0]) / (large["ranks"] - small["ranks"])
    moved = ranks**2 * (each[1] + slope * (ranks - large["ranks"]))
    return large["total"] * (ranks / large["ranks"]) ** power, moved


def store_rate(operations: int = 4000) -> float:
    """Operations per second of one client on a TCPStore of this machine: a bound from below of what a store serves."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    begin = time.perf_counter()
    for number in range(operations):
        server.set(f"key{number}", "x" * 100)
    return operations / (time.perf_counter() - begin)


def show_counts(layouts: list[str], ranks: list[int]) -> list[dict[str, Any]]:
    rate, found = store_rate(), []
    for layout in layouts:
        rows = [count(layout, each) for each in ranks if each % 2 == 0 or layout == "dp"]
        found += rows
        for row in rows:
            counts = f"{row['per_rank']} operations a rank, {row['total']} in all, {row['bytes']} bytes"
            print(f"{layout}, {row['ranks']} ranks: {counts}; {row['phases']}")
        if len(rows) > 1:
            for at in CURVE:
                needed, moved = at_scale(rows, at)
                print(f"  {at:5} ranks: {needed:9.0f} operations, {needed / rate:6.2f} s of a store; {moved / 1e6:10.1f} MB")
    return found


def show_files() -> dict[str, int]:
    """System calls that look for or open files from the start of a rank to the end of its first step, which also imports; needs
    strace for all but modules."""
    from dist_train import data
    from dist_train.config import compose

    train = "import sys; from dist_train.launcher.rank import main; code = main(sys.argv[1:])"
    train += "; print(len(sys.modules)); sys.exit(code)"
    with tempfile.TemporaryDirectory() as folder:
        config = compose.compose([*TINY, f"data.cache_dir={folder}/data"])
        data.prepare(config.data, progress=False)

        def run(name: str, program: str, *tracer: str) -> str:
            run_dir = Path(folder, name)
            run_dir.mkdir()
            (run_dir / "config.yaml").write_text(compose.dump(config))
            command = [*tracer, sys.executable, "-c", program, str(run_dir)]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        found = {"modules": int(run("untraced", train).split()[-1])}
        for name, program in (("rank", train), ("torch", "import torch")):
            trace = Path(folder, f"{name}.trace")
            try:
                run(name, program, "strace", "-f", "-e", "trace=openat,open,stat,lstat,newfstatat,statx", "-o", str(trace))
            except FileNotFoundError:
                print("strace is not installed: only modules are counted")
                break
            lines = trace.read_text(errors="replace").splitlines()
            found[f"{name} opens"] = sum(" open" in line for line in lines)
            found[f"{name} stats"] = sum("stat" in line.split("(")[0] for line in lines)
    print(", ".join(f"{name}: {number}" for name, number in found.items()))
    return found


def show_seconds(ranks: list[int], nodes: int) -> list[dict[str, Any]]:
    """From the command to the end of the first step of a tiny model, on `ranks` ranks of this machine or on `nodes` launchers."""
    found = []
    for each in ranks:
        with tempfile.TemporaryDirectory() as folder:
            words = [*TINY, f"mesh.dp={each * nodes}", f"launch.nodes={nodes}"]
            words += [f"run.dir={folder}/run", f"data.cache_dir={folder}/data"]
            command = [sys.executable, "-m", "dist_train.cli.main", "train", *words]
            port, begin = free_port(), time.time()
            started = []
            for node in range(nodes):
                place = {"DIST_TRAIN_NODES": nodes, "DIST_TRAIN_NODE_RANK": node, "DIST_TRAIN_RENDEZVOUS": f"127.0.0.1:{port}"}
                env = {**os.environ, **({name: str(value) for name, value in place.items()} if nodes > 1 else {})}
                started.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            codes = [process.wait(300) for process in started]
            if any(codes):
                raise SystemExit(f"starts.py: training on {each} ranks of {nodes} nodes ended with {codes}")
            first = os.stat(f"{folder}/run/metrics.jsonl").st_mtime - begin  # there is one step
            found.append({"ranks": each * nodes, "nodes": nodes, "seconds": first})
            print(f"{each * nodes} ranks on {nodes} nodes: {first:.1f} s to the end of the first step")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8", help="on this machine, or on each node")
    parser.add_argument("--layouts", default="dp,tp=2,pp=2")
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--seconds", action="store_true")
    parser.add_argument("--nodes", type=int, default=1, help="launchers, all on this machine (with --seconds)")
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    ranks = [int(each) for each in options.ranks.split(",")]
    found: Any
    if options.files:
        found = show_files()
    elif options.seconds:
        found = show_seconds(ranks, options.nodes)
    else:
        import dist_train.mesh.mesh  # noqa: F401 - before the forks

        found = show_counts(options.layouts.split(","), ranks)
    if options.json:
        Path(options.json).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
