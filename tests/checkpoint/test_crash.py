"""Writers that die at every point of a save, and disks that are full for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Forks a writer for k = 1, 2, ... that is killed by SIGKILL just before its k-th act on the file system, until one lives.
# (Python announces opens, renames and removals to audit hooks; fsync and the write of the shard are wrapped.)
KILLED = """
import json, os, signal, sys
from pathlib import Path
import torch
from dist_train.checkpoint import find, folders, load, pieces, verify
from tests.checkpoint.helpers import save_alone, whole

scenario, root = sys.argv[1], Path(sys.argv[2])
EVENTS = {"os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.chmod", "shutil.rmtree", "open"}

def tensors(value):
    return {"a": torch.full((300,), float(value)), "b": torch.full((7,), float(value))}

def die_at(k, save):
    left = [k]
    def act(event, *_):
        if event in EVENTS or event == "fsync":
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    fsync, save_file = os.fsync, pieces.save_file
    def half_written(tensors, path, metadata):
        Path(path).write_bytes(b"half a shard")
        act("fsync")
        Path(path).unlink()
        save_file(tensors, path, metadata=metadata)
        act("fsync")
    os.fsync = lambda descriptor: (act("fsync"), fsync(descriptor))
    pieces.save_file = half_written
    sys.addaudithook(act)
    save()

os.fsync = lambda descriptor: None  # SIGKILL leaves what was written; only a power cut would need it
rows = []
for k in range(1, 100):
    here = root / f"{scenario}{k}"
    save_alone(here, 4, tensors(4))
    save_alone(here, 5, tensors(5))
    step, value = (5, 50) if scenario == "replace" else (10, 10)
    pid = os.fork()
    if pid == 0:
        die_at(k, lambda: save_alone(here, step, tensors(value), keep=1))
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    found = find(here, "auto")
    got = {"a": torch.zeros(300), "b": torch.zeros(7)}
    load(found, whole(got))
    row = {"k": k, "signal": os.WTERMSIG(status), "step": int(found.name[5:13]), "problems": verify(found),
           "values": sorted({x for t in got.values() for x in t.tolist()}), "visible": list(folders.steps(here)),
           "damaged": [p.name for p in folders.steps(here).values() if verify(p)]}
    save_alone(here, 11, tensors(11))
    row["later"] = sorted(p.name for p in here.iterdir())
    rows.append(row)
    if not row["signal"]:
        break
print(json.dumps(rows))
"""

FULL = """
import resource, sys
from pathlib import Path
import torch
from dist_train.checkpoint import CheckpointError
from tests.checkpoint.helpers import save_alone
root = Path(sys.argv[1])
save_alone(root, 5, {"a": torch.ones(100)})
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    save_alone(root, 10, {"a": torch.ones(1000)}, {"text": "x" * 10000}, keep=1)
except CheckpointError as error:
    print(error)
"""


def run(script: str, *args: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, *args], cwd=root, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("scenario", ["new", "replace"])
def test_F15_F16_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path, scenario):
    rows = json.loads(run(KILLED, scenario, str(tmp_path)))
    new, before = (50, 5) if scenario == "replace" else (10, 5)
    assert len(rows) > 12 and rows[-1]["signal"] == 0 and all(row["signal"] == 9 for row in rows[:-1])
    for row in rows:
        assert row["problems"] == row["damaged"] == [] and row["values"] in ([before], [new]), row
        assert row["step"] == (10 if row["values"] == [10] else 5), row
        if row["values"] == [before]:
            assert row["visible"] == [4, 5], row  # nothing is pruned before the new one is safe
        assert not [name for name in row["later"] if "." in name] and f"step_{row['step']:08d}" in row["later"], row
    switch = [row["values"] == [new] for row in rows]
    assert switch == sorted(switch) and not switch[0] and switch[-1]  # once there, it stays there


@pytest.mark.parametrize(("limit", "what"), [(2000, "shard"), (8000, "manifest")])
def test_F15_F16_a_full_disk_leaves_the_earlier_checkpoint_and_nothing_else(tmp_path, limit, what):
    message = run(FULL, str(tmp_path), str(limit))
    assert "step_00000010: not saved: rank 0:" in message and "File too large" in message, what
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000005"]
