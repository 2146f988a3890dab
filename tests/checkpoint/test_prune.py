from __future__ import annotations

import errno
import os
import threading

import pytest
import torch

from dist_train.checkpoint import CheckpointError, find, folders, load, prune, read_state, store, verify
from tests.checkpoint.helpers import save_alone, whole, zeros_like

SHARD = "rank_00000.safetensors"


def kept(root):
    return list(folders.steps(root))


def save_steps(root, *steps, **options):
    for step in steps:
        save_alone(root, step, {"a": torch.full((3,), float(step))}, {"step": step}, **options)


def test_F17_rotation_is_by_number(tmp_path):
    save_steps(tmp_path, 900, 1000, 10000, keep=2)
    assert kept(tmp_path) == [1000, 10000]


def test_F17_rotation_is_by_number_where_names_sort_otherwise(tmp_path):
    save_steps(tmp_path, 99_999_999, 100_000_000, 100_000_001, keep=2)
    assert kept(tmp_path) == [100_000_000, 100_000_001]
    save_steps(tmp_path, 99_999_998)
    assert find(tmp_path, "auto") == tmp_path / "step_100000001"
    save_steps(tmp_path, 99_999_999, keep=3)
    assert kept(tmp_path) == [99_999_999, 100_000_000, 100_000_001]


def test_F17_the_best_is_never_pruned(tmp_path):
    save_steps(tmp_path, 900)
    save_steps(tmp_path, 1000, 10000, keep=1, protect=[900])
    assert kept(tmp_path) == [900, 10000]


def test_F17_zero_keeps_all(tmp_path):
    save_steps(tmp_path, 900, 1000, 10000, keep=0)
    assert kept(tmp_path) == [900, 1000, 10000]


def test_F17_the_one_just_written_is_never_pruned(tmp_path):
    save_steps(tmp_path, 500, 600)
    save_steps(tmp_path, 100, keep=1)  # a run that went back: what it wrote stays though higher numbers exist
    assert kept(tmp_path) == [100, 600]


def test_F16_F17_a_failed_save_prunes_nothing_and_leaves_nothing(tmp_path, monkeypatch):
    save_steps(tmp_path, 1, 2, 3)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_file", full)
        with pytest.raises(CheckpointError, match="step_00000004: not saved: rank 0: OSError.*No space left on device"):
            save_steps(tmp_path, 4, keep=1)
    assert kept(tmp_path) == [1, 2, 3] and len(list(tmp_path.iterdir())) == 3
    assert all(verify(tmp_path / folders.step_name(step)) == [] for step in (1, 2, 3))


@pytest.mark.parametrize("function", ["sync", "commit"])
def test_F15_a_failed_commit_leaves_the_earlier_checkpoint_of_the_same_step(tmp_path, monkeypatch, function):
    save_steps(tmp_path, 5)
    calls = []

    def fail(path, *args):
        calls.append(path)
        if function == "commit" or path == tmp_path:
            raise OSError(errno.EIO, "broken disk")

    with monkeypatch.context() as patch:
        patch.setattr(folders, function, fail)
        with pytest.raises(CheckpointError, match="broken disk"):
            save_alone(tmp_path, 5, {"a": torch.zeros(3)}, {"step": -5})
    assert calls and [p.name for p in tmp_path.iterdir()] == ["step_00000005"]
    assert read_state(find(tmp_path, "auto")) == {"step": 5}


def test_a_damaged_checkpoint_does_not_push_out_a_whole_one(tmp_path):
    save_steps(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step_00000003" / SHARD).write_bytes(b"")
    assert prune(tmp_path, keep=2) == [1, 3]
    assert kept(tmp_path) == [2, 4]
    (tmp_path / "step_00000009").mkdir()
    assert prune(tmp_path, keep=1) == [2]
    assert kept(tmp_path) == [4, 9]
    (tmp_path / "step_00000004" / SHARD).write_bytes(b"")
    assert prune(tmp_path, keep=1) == []


def test_the_same_step_again_replaces_it(tmp_path):
    save_steps(tmp_path, 5)
    save_alone(tmp_path, 5, {"a": torch.zeros(3)}, {"step": 5, "again": True})
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000005"]
    found = {"a": torch.ones(3)}
    assert load(find(tmp_path, "auto"), whole(found))["again"] and not found["a"].any()


def test_leftovers_of_dead_saves_are_cleaned_by_the_next_save(tmp_path):
    save_steps(tmp_path, 1, 2)
    dead = folders.stage(tmp_path, 3)
    (dead.path / SHARD).write_bytes(b"half")
    dead.close()
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000001.old-0badcafe")  # killed while replacing step 1
    (tmp_path / "notes").mkdir()
    assert kept(tmp_path) == [1, 2] and verify(folders.steps(tmp_path)[1]) == []
    save_steps(tmp_path, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step_00000001", "step_00000002", "step_00000004"]
    assert read_state(tmp_path / "step_00000001") == {"step": 1}


@pytest.mark.parametrize("fails", [False, True])
def test_two_saves_at_once_do_not_disturb_each_other(tmp_path, monkeypatch, fails):
    inside, go_on, outcome = threading.Event(), threading.Event(), []
    write = store.write_file

    def slow(path, pieces):
        if "step_00000010" in str(path):
            entry = write(path, pieces)
            inside.set()
            assert go_on.wait(20)
            if fails:
                raise OSError(errno.ENOSPC, "full")
            return entry
        return write(path, pieces)

    def first():
        try:
            save_steps(tmp_path, 10)
            outcome.append("saved")
        except CheckpointError:
            outcome.append("failed")

    monkeypatch.setattr(store, "write_file", slow)
    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(20)
    save_steps(tmp_path, 11, keep=1)  # tidies up, but must see that step 10 is being written
    assert kept(tmp_path) == [11] and any(".tmp-" in p.name for p in tmp_path.iterdir())
    go_on.set()
    thread.join(20)
    assert outcome == ["failed" if fails else "saved"]
    assert sorted(p.name for p in tmp_path.iterdir()) == (["step_00000011"] if fails else ["step_00000010", "step_00000011"])
    found = zeros_like({"a": torch.zeros(3)})
    load(find(tmp_path, "auto"), whole(found))
    assert found["a"].tolist() == [11, 11, 11]


def test_trouble_with_old_checkpoints_does_not_fail_the_save(tmp_path, monkeypatch, caplog):
    save_steps(tmp_path, 1, 2)

    def stuck(path):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(folders, "discard", stuck)
    save_steps(tmp_path, 3, keep=1)
    assert kept(tmp_path) == [1, 2, 3] and "not pruned" in caplog.text


def test_F15_everything_is_flushed_before_it_becomes_visible(tmp_path, monkeypatch):
    acts = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor):
        acts.append(("flush", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def note_rename(old, new):
        acts.append(("rename", os.path.basename(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    save_steps(tmp_path / "root", 5)
    staged = acts[2][1]
    assert staged.startswith("step_00000005.tmp-")
    assert acts == [
        ("flush", SHARD),
        ("flush", "manifest.json"),
        ("flush", staged),
        ("rename", "step_00000005"),
        ("flush", "root"),
    ]
