"""Save, find, load, verify and prune checkpoints.

A save is collective and ends in one of two ways on all ranks alike: the checkpoint is under its final name and durable,
or every rank raises the same CheckpointError, nothing is visible and the earlier checkpoints are untouched.

    1. all ranks tell what they hold; each distinct box is given to one holder; holes are refused
    2. index 0 makes step_00000100.tmp-<token>, on a file system that all ranks see
    3. every rank writes rank_00000.safetensors there and flushes it; all ranks tell how that went
    4. index 0 writes manifest.json, flushes, renames the folder to step_00000100, flushes the parent
    5. only then: leftovers of dead saves are removed and old checkpoints pruned, by number

Nothing is pickled in the files. A rank that dies in a save leaves a `.tmp-` folder, which the next save removes.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

from dist_train.checkpoint import folders
from dist_train.checkpoint.folders import logger, steps
from dist_train.checkpoint.manifest import CheckpointError, FileEntry, Manifest, SavedBox, TensorEntry, encode
from dist_train.checkpoint.pieces import REMEDY, Claim, Reader, assign, claim, write_file
from dist_train.checkpoint.reshard import intersect, slices, uncovered
from dist_train.comm.collectives import Collectives
from dist_train.config.compose import ConfigError
from dist_train.mesh.mesh import Group
from dist_train.params.geometry import Box, Piece

MANIFEST = "manifest.json"
T = TypeVar("T")
Written = tuple[FileEntry, list[tuple[str, SavedBox]]]


def save(
    root: Path,
    step: int,
    pieces: Iterable[Piece],
    state: dict[str, Any],
    comm: Collectives,
    group: Group,
    keep: int = 0,
    protect: Iterable[int] = (),
) -> Path:
    """Write the checkpoint of `step` and return its folder; collective over `group`, synchronous.

    `pieces`: what this rank holds; several ranks may hold the same box (replicas must be equal), it is written once.
    Together they must cover every tensor. `state`: JSON values; that of index 0 is kept. `keep`: how many of the newest
    checkpoints remain (0: all); this one and the steps in `protect` always do. A checkpoint of the same step is replaced.
    Raises CheckpointError on every rank when any rank fails, naming it.
    """
    root, final = Path(root), Path(root) / folders.step_name(step)
    held: list[Piece] = []

    def describe() -> list[Claim]:
        encode(state)
        held.extend(pieces)
        return [claim(piece) for piece in held]

    claims = _together(final, comm, group, describe)
    _check_claims(final, claims)
    mine = assign(claims)[group.index]

    staging = _on_first(final, comm, group, lambda: folders.stage(root, step))
    try:
        name = comm.broadcast_object(staging.path.name if staging else None, group)
        try:
            written = _together(final, comm, group, lambda: _write_rank(root / name, group.index, [held[i] for i in mine]))
            _on_first(final, comm, group, lambda: _commit(root / name, step, claims, written, state))
        except CheckpointError:
            # Every rank has come to an agreed end, so nobody writes there any more. (A rank that died raises another
            # error: then the folder is left to the next save, as others may still be writing.)
            if staging is not None:
                _discard_quietly(staging.path)
            raise
    finally:
        if staging is not None:
            staging.close()
    if staging is not None:
        _tidy(root, step, keep, protect)
    comm.barrier(group)
    return final


def load(path: Path, wanted: Iterable[Piece], strict: bool = True) -> dict[str, Any]:
    """Fill the wanted tensors in place from whatever boxes were saved and return the saved state. Not collective.

    Values are cast to the dtype of the wanted tensor. With `strict=False` names that the checkpoint lacks are left as they
    are. Raises CheckpointError naming file and tensor: before anything is filled for a missing name, another global shape
    or a hole; while filling for a damaged file, and then the tensors must not be used.
    """
    path = Path(path)
    manifest = read_manifest(path)
    jobs: list[tuple[Piece, SavedBox, Box]] = []
    for piece in wanted:
        entry = manifest.tensors.get(piece.name)
        if entry is None:
            if strict:
                raise _missing(path, piece.name, manifest)
            continue
        if entry.shape != tuple(piece.shape):
            raise CheckpointError(
                f"{path / MANIFEST}: tensor {piece.name} has shape {list(entry.shape)} and the model wants {list(piece.shape)}. "
                "Set the model.* values that the checkpoint was made with."
            )
        claim(piece)
        if (hole := uncovered(piece.box, [saved.box for saved in entry.boxes])) is not None:
            raise CheckpointError(f"{path / MANIFEST}: tensor {piece.name}: no saved box holds {hole}. {REMEDY}")
        jobs += [(piece, saved, common) for saved in entry.boxes if (common := intersect(piece.box, saved.box)) is not None]
    reader = Reader(path, manifest)
    with torch.no_grad():
        for piece, saved, common in sorted(jobs, key=lambda job: (job[1].file, job[1].start)):
            piece.tensor[slices(common, piece.box)].copy_(reader.read(piece.name, saved, common))
    return manifest.state


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises CheckpointError naming the file."""
    file = Path(path) / MANIFEST
    try:
        text = file.read_bytes()
    except OSError as error:
        remedy = "Give the folder of a checkpoint, such as RUN/checkpoints/step_00000100."
        raise CheckpointError(f"{file}: not readable ({error.strerror}). {remedy}") from error
    return Manifest.from_json(text, str(file))


def read_state(path: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint, without its tensors. Raises CheckpointError."""
    return read_manifest(path).state


def names(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Global shape and dtype of every tensor of a checkpoint. Raises CheckpointError."""
    return {name: (entry.shape, getattr(torch, entry.dtype)) for name, entry in read_manifest(path).tensors.items()}


def find(root: Path, resume: str, older_than: int | None = None) -> Path | None:
    """The checkpoint that `checkpoint.resume` asks for.

    auto: the newest whole checkpoint of `root` by number (of a step below `older_than`), None when there is no checkpoint at
    all; where there are some and all are damaged, starting over would overwrite them: ConfigError. never: None. Otherwise
    the path of a checkpoint, of a folder of checkpoints or of a run folder, of which the newest whole one is taken. Whole
    means here: the manifest is intact and every file is there in its size with an intact header; damaged ones are passed over
    with a warning. Bytes of tensors are checked by `load`. Raises ConfigError when a path leads to no checkpoint.
    """
    if resume == "never":
        return None
    if resume == "auto":
        newest, damage = _newest_whole(Path(root), older_than)
        if newest is None and damage:
            remedy = "Mend or move them, or start in another run.dir."
            raise ConfigError(f"checkpoint.resume=auto: no whole checkpoint in {root} ({'; '.join(damage)}). {remedy}")
        return newest
    path, damage = Path(resume).expanduser(), []
    if (path / MANIFEST).exists():
        if problems := outline_problems(path):
            raise CheckpointError(f"checkpoint.resume={resume}: {problems[0]}")
        return path
    for folder in (path, path / "checkpoints"):
        found, problems = _newest_whole(folder)
        if found is not None:
            return found
        damage += problems
    reason = f"no whole checkpoint there ({'; '.join(damage)})" if damage else "no checkpoint there"
    remedy = "Give the path of a checkpoint (…/step_00000100) or of a run folder, auto, or never."
    raise ConfigError(f"checkpoint.resume={resume}: {reason}. {remedy}")


def outline_problems(path: Path) -> list[str]:
    """What is wrong with a checkpoint as far as its manifest, file sizes and headers show; empty when it is whole."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    reader, problems = Reader(Path(path), manifest), []
    for file in manifest.files:
        problems += _complaints(lambda file=file: reader.check_header(file))  # type: ignore[misc]
    return problems


def verify(path: Path) -> list[str]:
    """Read every byte of a checkpoint and return its problems: missing files, wrong sizes, wrong checksums, holes."""
    problems = outline_problems(path)
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return problems
    reader = Reader(Path(path), manifest)
    bad = {file for file in manifest.files if _complaints(lambda file=file: reader.check_header(file))}  # type: ignore[misc]
    for name, entry in manifest.tensors.items():
        if (hole := uncovered(Box((0,) * len(entry.shape), entry.shape), [b.box for b in entry.boxes])) is not None:
            problems.append(f"{Path(path) / MANIFEST}: tensor {name}: no saved box holds {hole}")
        for saved in entry.boxes:
            if saved.file not in bad:
                problems += _complaints(lambda name=name, saved=saved: reader.check(name, saved, 0, saved.bytes))  # type: ignore[misc]
    return problems


def prune(root: Path, keep: int, protect: Iterable[int] = ()) -> list[int]:
    """Remove all but the `keep` newest whole checkpoints and those in `protect`; 0 keeps all. Returns the removed steps.

    Newest is by number. Damaged checkpoints do not count among the kept, so they never push out a whole one.
    """
    if keep <= 0:
        return []
    found = steps(Path(root))
    whole = [step for step in reversed(found) if not outline_problems(found[step])]
    stay, removed = {*whole[:keep], *protect}, []
    for step, path in found.items():
        # A damaged one that is newer than every whole one is left for its owner to look at.
        if step not in stay and whole and step < whole[0]:
            folders.discard(path)
            removed.append(step)
    return removed


def _write_rank(folder: Path, index: int, pieces: list[Piece]) -> Written | None:
    return write_file(folder / f"rank_{index:05d}.safetensors", pieces) if pieces else None


def _commit(folder: Path, step: int, claims: list[list[Claim]], written: list[Written | None], state: dict[str, Any]) -> Path:
    files: dict[str, FileEntry] = {}
    boxes: dict[str, list[SavedBox]] = {one.name: [] for held in claims for one in held}
    kinds = {one.name: (one.shape, one.dtype) for held in claims for one in held}
    for rank, part in enumerate(written):
        if part is not None:
            files[f"rank_{rank:05d}.safetensors"] = part[0]
            for name, saved in part[1]:
                boxes[name].append(saved)
    tensors = {name: TensorEntry(*kinds[name], tuple(boxes[name])) for name in sorted(boxes)}
    manifest = Manifest(step, tensors, files, state)
    descriptor = os.open(folder / MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    return folders.commit(folder, step)


def _discard_quietly(path: Path) -> None:
    try:
        folders.discard(path)
    except OSError as error:  # a disk in trouble: the next save tries again
        logger.warning("%s: not removable (%s)", path, error)


def _tidy(root: Path, step: int, keep: int, protect: Iterable[int]) -> None:
    # The checkpoint is safe by now: trouble with old ones is worth a warning, not a failed save.
    try:
        folders.sweep(root)
        prune(root, keep, {step, *protect})
    except OSError as error:
        logger.warning("%s: old checkpoints were not pruned (%s)", root, error)


def _check_claims(final: Path, claims: list[list[Claim]]) -> None:
    kinds: dict[str, Claim] = {}
    boxes: dict[str, set[Box]] = {}
    for held in claims:
        for one in held:
            first = kinds.setdefault(one.name, one)
            if (first.shape, first.dtype) != (one.shape, one.dtype):
                raise CheckpointError(
                    f"{final}: not saved: tensor {one.name} is {list(first.shape)} {first.dtype} on one rank "
                    f"and {list(one.shape)} {one.dtype} on another."
                )
            boxes.setdefault(one.name, set()).add(one.box)
    for name, first in kinds.items():
        if (hole := uncovered(Box((0,) * len(first.shape), first.shape), boxes[name])) is not None:
            raise CheckpointError(f"{final}: not saved: tensor {name} of shape {list(first.shape)}: no rank holds {hole}.")


def _together(final: Path, comm: Collectives, group: Group, work: Callable[[], T]) -> list[T]:
    """Do `work` on every rank and return all results; when it fails on any, every rank raises the same error."""
    value, cause = None, None
    try:
        value = work()
    except Exception as error:  # whatever it is, the other ranks wait for this one's answer
        cause = error
    answers = comm.all_gather_object((value, None if cause is None else _text(cause)), group)
    failed = [f"rank {rank}: {text}" for rank, (_, text) in zip(group.ranks, answers) if text is not None]
    if failed:
        raise CheckpointError(f"{final}: not saved: {'; '.join(failed)}. Earlier checkpoints are untouched.") from cause
    return [answer for answer, _ in answers]


def _on_first(final: Path, comm: Collectives, group: Group, work: Callable[[], T]) -> T | None:
    """Do `work` on index 0, where its result is returned (None elsewhere); when it fails every rank raises the same error."""
    value: list[T] = []

    def first() -> None:
        if group.index == 0:
            value.append(work())

    _together(final, comm, group, first)
    return value[0] if value else None


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


def _complaints(check: Callable[[], None]) -> list[str]:
    try:
        check()
    except CheckpointError as error:
        return [str(error)]
    return []


def _newest_whole(root: Path, older_than: int | None = None) -> tuple[Path | None, list[str]]:
    damage: list[str] = []
    for step, path in reversed(steps(root).items()):
        if older_than is not None and step >= older_than:
            continue
        problems = outline_problems(path)
        if not problems:
            return path, damage
        logger.warning("checkpoint passed over: %s", problems[0])
        damage += problems
    return None, damage


def _missing(path: Path, name: str, manifest: Manifest) -> CheckpointError:
    close = difflib.get_close_matches(name, list(manifest.tensors), n=1)
    hint = f" (there is {close[0]})" if close else ""
    remedy = "Set the model.* and optim.* values that the checkpoint was made with, or load weights only."
    return CheckpointError(f"{path / MANIFEST}: no tensor {name}{hint}. {remedy}")
