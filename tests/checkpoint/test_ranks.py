from __future__ import annotations

import errno
import os

import torch

from dist_train.checkpoint import CheckpointError, Piece, find, folders, load, save, store, verify
from dist_train.checkpoint.manifest import Manifest
from dist_train.checkpoint.pieces import Claim, assign
from tests.checkpoint.helpers import flat_buffer, flat_pieces, odd_tensors, save_alone, whole, zeros_like
from tests.ranks import run_ranks


def save_flat(mesh, comm, root):
    tensors = odd_tensors()
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    held = flat_pieces(flat_buffer(tensors, mesh.world.size)[mesh.rank], shapes, mesh.rank, mesh.world.size)
    own = Piece.whole(f"rng/{mesh.rank}/torch", torch.full((4,), mesh.rank, dtype=torch.uint8))
    return str(save(root, 3, [*held, own], {"rank": mesh.rank}, comm, mesh.world))


def load_flat(mesh, comm, path):
    tensors = odd_tensors()
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    expected = flat_buffer(tensors, mesh.world.size)[mesh.rank]
    found = torch.full_like(expected, torch.nan)
    own = torch.zeros(4, dtype=torch.uint8)
    state = load(path, [*flat_pieces(found, shapes, mesh.rank, mesh.world.size), Piece.whole(f"rng/{mesh.rank}/torch", own)])
    return torch.equal(found.nan_to_num(-1), expected.nan_to_num(-1)), own.tolist(), state


def test_F04_F18_F21_saved_by_four_ranks_and_loaded_by_one_two_and_four(tmp_path):
    paths = run_ranks(4, save_flat, tmp_path)
    assert set(paths) == {str(tmp_path / "step_00000003")} and verify(paths[0]) == []
    assert sorted(p.name for p in (tmp_path / "step_00000003").iterdir()) == [
        "manifest.json",
        *(f"rank_{r:05d}.safetensors" for r in range(4)),
    ]
    for ranks in (1, 2, 4):
        assert run_ranks(ranks, load_flat, paths[0]) == [(True, [rank] * 4, {"rank": 0}) for rank in range(ranks)]


def save_replicas(mesh, comm, root):
    tensors = odd_tensors()
    return str(save(root, 1, whole(tensors), {}, comm, mesh.world))


def test_replicas_are_written_once_and_the_bytes_are_balanced(tmp_path):
    path = run_ranks(2, save_replicas, tmp_path)[0]
    with open(f"{path}/manifest.json") as file:
        manifest = Manifest.from_json(file.read(), "m")
    boxes = [box for entry in manifest.tensors.values() for box in entry.boxes]
    assert len(boxes) == len(odd_tensors()) and len({box.file for box in boxes}) == 2
    loads = [sum(box.bytes for box in boxes if box.file == file) for file in manifest.files]
    assert abs(loads[0] - loads[1]) < 1300  # the two large tensors went to different ranks
    found = zeros_like(odd_tensors())
    load(path, whole(found))
    assert all(torch.equal(found[name], tensor) for name, tensor in odd_tensors().items())


def test_assignment_fills_up_ranks_that_have_less_of_their_own():
    def claim(name, rows):
        return Claim(name, "float32", (rows,), Piece.whole(name, torch.zeros(rows)).box)

    shared = [claim(f"s{i}", 10) for i in range(4)]
    chosen = assign([[claim("own", 30), *shared], shared, [claim("nothing", 0), *shared]])
    assert chosen[0] == [0] and sorted(chosen[1] + [i - 1 for i in chosen[2] if i]) == [0, 1, 2, 3] and len(chosen[1]) == 2
    assert assign([[claim("own", 5), claim("s", 10)], [claim("s", 10)]]) == [[0], [0]]
    owned = [Claim("w", "float32", (4,), Piece("w", torch.zeros(n), (4,), (o,)).box) for n, o in ((4, 0), (0, 4))]
    assert assign([[owned[0]], [owned[1]]]) == [[0], []]  # an empty part of a tensor is nobody's work


def save_where_a_disk_is_full(mesh, comm, root, culprit):
    write = store.write_file

    def full(path, pieces):
        write(path, pieces)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    store.write_file = full if mesh.rank == culprit else write
    try:
        save(root, 10, [Piece.whole(f"w{mesh.rank}", torch.ones(5))], {}, comm, mesh.world, keep=1)
        outcome = "saved"
    except CheckpointError as error:
        outcome = str(error)
    finally:
        store.write_file = write
    between = sorted(os.listdir(root))
    comm.barrier(mesh.world)
    save(root, 11, [Piece.whole(f"w{mesh.rank}", torch.full((5,), 11.0))], {}, comm, mesh.world, keep=1)
    return outcome, between


def test_F15_F16_a_full_disk_on_one_rank_is_the_same_error_on_all(tmp_path):
    for culprit in (0, 1):
        root = tmp_path / str(culprit)
        save_alone(root, 5, {"w0": torch.ones(5)})
        outcomes = run_ranks(2, save_where_a_disk_is_full, root, culprit)
        assert outcomes[0][0] == outcomes[1][0]
        assert (
            f"step_00000010: not saved: rank {culprit}: OSError" in outcomes[0][0] and "No space left on device" in outcomes[0][0]
        )
        assert outcomes[0][1] == ["step_00000005"]
        assert list(folders.steps(root)) == [11] and len(list(root.iterdir())) == 1 and verify(find(root, "auto")) == []


def save_what_does_not_fit_together(mesh, comm, root, case):
    def late():
        yield Piece.whole("w", torch.ones(4))
        if mesh.rank == 1:
            raise RuntimeError("lost the device")

    pieces = {
        "shape": [Piece.whole("w", torch.ones(4 + mesh.rank))],
        "dtype": [Piece.whole("w", torch.ones(4).to([torch.float32, torch.float64][mesh.rank]))],
        "hole": [Piece("w", torch.ones(2), (5,), (3 * mesh.rank,))],
        "raises": late(),
    }[case]
    try:
        save(root, 1, pieces, {}, comm, mesh.world)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_pieces_that_do_not_fit_together_are_refused_on_all_ranks(tmp_path):
    expected = {
        "shape": "tensor w is",
        "dtype": "tensor w is",
        "hole": "no rank holds [2:3]",
        "raises": "rank 1: RuntimeError: lost the device",
    }
    for case, complaint in expected.items():
        outcomes = run_ranks(2, save_what_does_not_fit_together, tmp_path, case)
        assert outcomes[0] == outcomes[1] and complaint in outcomes[0]
    assert list(tmp_path.iterdir()) == []


def save_into_a_file(mesh, comm, root):
    try:
        save(root, 1, [Piece.whole("w", torch.ones(4))], {}, comm, mesh.world)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_folder_that_cannot_be_made_is_the_same_error_on_all_ranks(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    outcomes = run_ranks(2, save_into_a_file, tmp_path / "checkpoints")
    assert outcomes[0] == outcomes[1] and "not saved: rank 0: " in outcomes[0] and "checkpoints" in outcomes[0]
