from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dist_train.checkpoint import CheckpointError, Piece, find, load, manifest, names, pieces, read_state, save, verify
from dist_train.comm.collectives import Collectives
from dist_train.config.compose import ConfigError
from dist_train.mesh.mesh import ParallelMesh
from tests.checkpoint.helpers import flat_buffer, flat_pieces, odd_tensors, save_alone, whole, zeros_like

SHARD = "rank_00000.safetensors"


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def flip(path: Path, position: int):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def box_of(path: Path, name: str):
    return manifest.Manifest.from_json((path / "manifest.json").read_text(), "m").tensors[name].boxes[0]


def test_F04_tensors_of_any_shape_and_the_state_come_back_bit_for_bit(tmp_path):
    tensors = odd_tensors()
    path = save_alone(tmp_path, 7, tensors, {"step": 7, "best": float("inf"), "scaler": {"scale": 2.0**-3, "growth": 5}})
    found = zeros_like(tensors)
    assert load(path, whole(found)) == {"step": 7, "best": float("inf"), "scaler": {"scale": 2.0**-3, "growth": 5}}
    assert equal(found, tensors)
    assert path == tmp_path / "step_00000007" and verify(path) == []
    assert names(path) == {name: (tuple(t.shape), torch.float32) for name, t in tensors.items()}


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in manifest.ITEM_BYTES], ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    bits = torch.arange(48, dtype=torch.uint8) % (2 if dtype == torch.bool else 120)
    tensors = {"a": bits.view(dtype).clone(), "scalar": bits[8:16].view(dtype)[0].clone(), "empty": torch.zeros(0).to(dtype)}
    found = zeros_like(tensors)
    load(save_alone(tmp_path, 1, tensors), whole(found))
    assert all(torch.equal(found[k].reshape(-1).view(torch.uint8), tensors[k].reshape(-1).view(torch.uint8)) for k in tensors)


def test_values_are_cast_to_the_wanted_dtype(tmp_path):
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    path = save_alone(tmp_path, 1, {"w": weight})
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        found = torch.zeros(5, 3, dtype=dtype)
        load(path, [Piece.whole("w", found)])
        assert torch.equal(found, weight.to(dtype))


def test_any_strides_are_saved_and_filled(tmp_path):
    base = torch.arange(24.0)
    tensors = {"t": base.view(4, 6).t(), "every": base[::3], "tied": base, "tied_too": base, "expanded": torch.ones(1).expand(5)}
    path = save_alone(tmp_path, 1, tensors)
    target = torch.zeros(4, 6)
    load(path, [Piece.whole("t", target.t()), Piece.whole("every", (every := torch.zeros(16))[::2])])
    assert torch.equal(target, base.view(4, 6)) and torch.equal(every[::2], base[::3]) and not every[1::2].any()
    found = {"tied": torch.zeros(24), "tied_too": torch.zeros(24), "expanded": torch.zeros(5)}
    load(path, whole(found))
    assert torch.equal(found["tied_too"], base) and torch.equal(found["expanded"], torch.ones(5))


def test_leaf_parameters_are_filled_in_place(tmp_path):
    path = save_alone(tmp_path, 1, {"w": torch.arange(3.0)})
    parameter = torch.nn.Parameter(torch.zeros(3))
    address = parameter.data_ptr()
    load(path, [Piece.whole("w", parameter)])
    assert parameter.tolist() == [0, 1, 2] and parameter.data_ptr() == address and parameter.grad_fn is None


def test_any_tool_reads_the_files(tmp_path):
    tensors = odd_tensors()
    path = save_alone(tmp_path, 3, tensors)
    with safe_open(path / SHARD, "pt") as file:
        assert equal({k: file.get_tensor(k) for k in file.keys()}, tensors)  # noqa: SIM118 - not a dict
    plain = json.loads((path / "manifest.json").read_text())["manifest"]["tensors"]["model/cube"]
    where = plain["boxes"][0]
    data = (path / where["file"]).read_bytes()[where["start"] : where["start"] + where["bytes"]]
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32).view(plain["shape"]), tensors["model/cube"])


def test_files_are_private_to_the_user(tmp_path, monkeypatch):
    def open_to_all(tensors, path, metadata):  # as safetensors before 0.8 wrote
        save_file(tensors, path, metadata=metadata)
        os.chmod(path, 0o644)

    save_file = pieces.save_file
    monkeypatch.setattr(pieces, "save_file", open_to_all)
    old = os.umask(0)
    try:
        path = save_alone(tmp_path / "checkpoints", 1, {"a": torch.ones(3)})
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_F18_F21_flat_shards_load_at_any_number_of_ranks_without_padding(tmp_path, ranks):
    tensors = odd_tensors()
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    saved = flat_buffer(tensors, 4)
    held = [piece for rank in range(4) for piece in flat_pieces(saved[rank], shapes, rank, 4)]
    path = save(tmp_path, 1, held, {}, Collectives(), ParallelMesh.single().world)
    assert verify(path) == []
    expected = flat_buffer(tensors, ranks)
    for rank in range(ranks):
        found = torch.full_like(expected[rank], torch.nan)
        load(path, flat_pieces(found, shapes, rank, ranks))
        assert torch.equal(found.nan_to_num(-1), expected[rank].nan_to_num(-1))
    columns = torch.zeros(53, 2)  # and a layout of another kind: two columns, as tensor parallelism holds them
    load(path, [Piece("model/embed.weight", columns, (53, 6), (0, 3))])
    assert torch.equal(columns, tensors["model/embed.weight"][:, 3:5])


def test_a_slice_reads_and_checks_only_its_blocks(tmp_path, monkeypatch):
    for module in (pieces, manifest):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    tensors = {"w": torch.arange(100.0).view(25, 4)}  # a block is four rows
    path = save_alone(tmp_path, 1, tensors)
    assert len(box_of(path, "w").crc32) == 7
    flip(path / SHARD, box_of(path, "w").start + 5 * 64 + 3)
    for row in range(25):
        found = torch.zeros(1, 4)
        if row // 4 == 5:
            with pytest.raises(CheckpointError, match=SHARD):
                load(path, [Piece("w", found, (25, 4), (row, 0))])
        else:
            load(path, [Piece("w", found, (25, 4), (row, 0))])
            assert torch.equal(found[0], tensors["w"][row])
    with pytest.raises(CheckpointError, match=SHARD):
        load(path, [Piece("w", torch.zeros(25, 1), (25, 4), (0, 2))])
    assert len(verify(path)) == 1


def test_F15_every_flipped_byte_of_a_file_is_noticed_and_the_file_named(tmp_path):
    path = save_alone(tmp_path, 1, {"model/a": torch.arange(3.0), "model/b": torch.arange(5.0).bfloat16()})
    good = (path / SHARD).read_bytes()
    for position in range(len(good)):
        flip(path / SHARD, position)
        problems = verify(path)
        assert len(problems) == 1 and SHARD in problems[0] and "damaged" in problems[0], position
        (path / SHARD).write_bytes(good)
    assert verify(path) == []


def test_F15_loading_a_flipped_byte_names_file_and_tensor(tmp_path):
    tensors = {"model/a": torch.arange(3.0), "model/b": torch.arange(5.0)}
    path = save_alone(tmp_path, 1, tensors)
    flip(path / SHARD, box_of(path, "model/b").start)
    with pytest.raises(CheckpointError, match=rf"{SHARD}: damaged: tensor model/b.*checkpoint.resume"):
        load(path, whole(zeros_like(tensors)))
    load(path, [Piece.whole("model/a", found := torch.zeros(3))])  # what is whole is still there
    assert found.tolist() == [0, 1, 2]


@pytest.mark.parametrize("damage", ["truncate", "extend", "remove", "empty"])
def test_F15_a_truncated_or_missing_file_is_named(tmp_path, damage):
    path = save_alone(tmp_path, 1, {"a": torch.arange(3.0)})
    data = (path / SHARD).read_bytes()
    if damage == "remove":
        (path / SHARD).unlink()
    else:
        (path / SHARD).write_bytes({"truncate": data[:-1], "extend": data + b"\0", "empty": b""}[damage])
    with pytest.raises(CheckpointError, match=SHARD):
        load(path, [Piece.whole("a", torch.zeros(3))])
    assert len(verify(path)) == 1 and SHARD in verify(path)[0]


def test_what_is_not_in_the_checkpoint_is_refused_before_anything_is_filled(tmp_path):
    path = save_alone(tmp_path, 1, {"model/wq": torch.ones(4, 2), "model/b": torch.ones(3)})
    untouched = torch.zeros(3)
    first = Piece.whole("model/b", untouched)
    for piece, complaint in [
        (Piece.whole("model/wg", torch.zeros(4, 2)), r"manifest\.json: no tensor model/wg \(there is model/wq\)"),
        (
            Piece.whole("model/wq", torch.zeros(2, 4)),
            r"tensor model/wq has shape \[4, 2\] and the model wants \[2, 4\].*model\.\*",
        ),
        (Piece("model/wq", torch.zeros(2, 2), (4, 2), (3, 0)), "model/wq: box .* does not lie in shape"),
    ]:
        with pytest.raises(CheckpointError, match=complaint):
            load(path, [first, piece])
    assert not untouched.any()
    left = torch.full((2,), 5.0)
    load(path, [first, Piece.whole("model/other", left)], strict=False)
    assert untouched.all() and left.tolist() == [5, 5]
    with pytest.raises(CheckpointError, match="has shape"):
        load(path, [Piece.whole("model/b", torch.zeros(4))], strict=False)


def test_a_hole_is_refused_by_name_when_saving_and_when_loading(tmp_path):
    world = ParallelMesh.single().world
    half = [Piece("w", torch.ones(2, 3), (4, 3), (0, 0)), Piece("w", torch.ones(1, 3), (4, 3), (3, 0))]
    with pytest.raises(CheckpointError, match=r"tensor w of shape \[4, 3\]: no rank holds \[2:3, 0:3\]"):
        save(tmp_path, 1, half, {}, Collectives(), world)
    assert list(tmp_path.iterdir()) == []
    path = save_alone(tmp_path, 1, {"w": torch.ones(4, 3)})
    whole_manifest = manifest.Manifest.from_json((path / "manifest.json").read_text(), "m")
    box = whole_manifest.tensors["w"].boxes[0]
    cut = manifest.SavedBox(manifest.Box((0, 0), (3, 3)), box.file, box.start, 36, box.crc32)
    entry = manifest.TensorEntry((4, 3), "float32", (cut,))
    (path / "manifest.json").write_text(manifest.Manifest(1, {"w": entry}, whole_manifest.files).to_json())
    with pytest.raises(CheckpointError, match=r"tensor w: no saved box holds \[3:4, 0:3\]"):
        load(path, [Piece.whole("w", torch.zeros(4, 3))])
    assert any("no saved box holds [3:4, 0:3]" in problem for problem in verify(path))


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ([Piece.whole("w", torch.zeros(2, dtype=torch.complex64))], "tensor w: dtype complex64"),
        ([Piece("w", torch.zeros(2), (3,), (2,))], "tensor w: box"),
        ([Piece("w", torch.zeros(2), (3,), (-1,))], "tensor w: box"),
        ([Piece("w", torch.zeros(2), (2, 1), (0,))], "tensor w: box"),
        ([Piece.whole("w", torch.zeros(2)), Piece.whole("w", torch.zeros(3))], "tensor w is"),
        ([Piece.whole("w", torch.zeros(2)), Piece("w", torch.zeros(1).double(), (2,), (0,))], "tensor w is"),
    ],
)
def test_pieces_that_make_no_tensor_are_refused_by_name(tmp_path, bad, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        save(tmp_path, 1, bad, {}, Collectives(), ParallelMesh.single().world)
    assert list(tmp_path.iterdir()) == []


def test_state_that_is_no_json_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="checkpoint state: .*is a Tensor"):
        save_alone(tmp_path, 1, {}, {"loss": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []


def test_find_takes_the_newest_whole_checkpoint_by_number(tmp_path, caplog):
    run = tmp_path / "run"
    root = run / "checkpoints"
    assert find(root, "auto") is None and find(root, "never") is None
    for step in (900, 1000, 10000, 123456789):
        save_alone(root, step, {"a": torch.ones(3)}, {"step": step})
    assert find(root, "never") is None
    for resume in ("auto", str(run), str(root)):
        assert find(root, resume) == root / "step_123456789"
    (root / "step_123456789" / SHARD).write_bytes(b"short")
    (root / "step_00010000" / "manifest.json").write_text("{")
    (root / "step_00020000").mkdir()
    with caplog.at_level(logging.WARNING, "dist_train.checkpoint"):
        assert read_state(find(root, "auto")) == {"step": 1000}
    assert [name in caplog.text for name in ("step_123456789", "step_00020000", "step_00010000", "step_00001000")] == [
        True,
        True,
        True,
        False,
    ]
    assert find(root, str(root / "step_00000900")) == root / "step_00000900"


@pytest.mark.parametrize("where", ["nowhere", "empty"])
def test_a_path_without_a_checkpoint_is_a_config_error(tmp_path, where):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=rf"checkpoint\.resume=.*{where}: no checkpoint there\. Give the path"):
        find(tmp_path, str(tmp_path / where))


def test_a_path_of_a_damaged_checkpoint_is_refused_and_named(tmp_path):
    path = save_alone(tmp_path / "checkpoints", 1, {"a": torch.ones(3)})
    (path / SHARD).write_bytes(b"short")
    with pytest.raises(CheckpointError, match=SHARD):
        find(tmp_path, str(path))
    with pytest.raises(ConfigError, match=f"no whole checkpoint there .*{SHARD}"):
        find(tmp_path, str(tmp_path))
    (path / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"manifest\.json"):
        find(tmp_path, str(tmp_path))


def test_loading_never_unpickles(tmp_path, monkeypatch):
    import pickle

    path = save_alone(tmp_path, 1, odd_tensors(), {"a": 1})

    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    found = zeros_like(odd_tensors())
    assert load(path, whole(found)) == {"a": 1} and equal(found, odd_tensors()) and verify(path) == []
    assert find(tmp_path, "auto") == path and names(path)
