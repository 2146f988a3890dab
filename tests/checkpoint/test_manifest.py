from __future__ import annotations

import json
import math

import pytest

from dist_train.checkpoint.manifest import CheckpointError, FileEntry, Manifest, SavedBox, TensorEntry, decode, encode
from dist_train.params.geometry import Box

FILE = "rank_00000.safetensors"


def example() -> Manifest:
    whole = SavedBox(Box((0, 0), (2, 3)), FILE, 64, 24, (7,))
    scalar = SavedBox(Box((), ()), FILE, 88, 4, (9,))
    empty = SavedBox(Box((0,), (0,)), FILE, 92, 0, ())
    tensors = {
        "model/w": TensorEntry((2, 3), "float32", (whole,)),
        "model/s": TensorEntry((), "float32", (scalar,)),
        "model/e": TensorEntry((0,), "bfloat16", (empty,)),
    }
    return Manifest(
        12, tensors, {FILE: FileEntry(92, 64, 5)}, {"step": 12, "best": math.inf, "name": "é\n", "list": [1.5, None, True]}
    )


def test_a_manifest_reads_back_equal():
    assert Manifest.from_json(example().to_json(), "m") == example()


def test_a_manifest_is_strict_json():
    def refuse(name):
        raise AssertionError(name)

    assert json.loads(example().to_json(), parse_constant=refuse)["manifest"]["step"] == 12


def test_white_space_may_change_but_no_value():
    outer = json.loads(example().to_json())
    assert Manifest.from_json(json.dumps(outer, indent=3), "m") == example()
    outer["manifest"]["state"]["step"] = 13
    with pytest.raises(CheckpointError, match=r"^/x/manifest\.json: damaged: .*checksum"):
        Manifest.from_json(json.dumps(outer), "/x/manifest.json")


@pytest.mark.parametrize("position", range(0, 1200, 7))
def test_F15_a_flipped_bit_anywhere_is_noticed(position):
    text = bytearray(example().to_json().encode())
    position %= len(text) - 1  # the last byte is the newline
    text[position] ^= 1
    with pytest.raises(CheckpointError, match="^m: "):
        Manifest.from_json(bytes(text), "m")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "7", '{"crc32": 1}', '{"crc32": 1, "manifest": {}}', '{"crc32":1,"manifest":[]}', "\xff"]
)
def test_a_text_that_is_no_manifest_is_refused_by_file(text):
    with pytest.raises(CheckpointError, match="^here: not a whole manifest"):
        Manifest.from_json(text.encode("latin-1"), "here")


def rewritten(change) -> str:
    """The example with `change` applied to its inner object and the checksum made right again."""
    import zlib

    body = json.loads(example().to_json())["manifest"]
    change(body)
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({"crc32": zlib.crc32(canonical.encode()), "manifest": body})


def box(body):
    return body["tensors"]["model/w"]["boxes"][0]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda b: b.pop("state"), "missing key 'state'"),
        (lambda b: b.pop("tensors"), "missing key 'tensors'"),
        (lambda b: b.pop("files"), "missing key 'files'"),
        (lambda b: b.pop("step"), "missing key 'step'"),
        (lambda b: b.update(step=-1), "no count"),
        (lambda b: b.update(step=True), "no count"),
        (lambda b: b.update(state=[]), "state is no object"),
        (lambda b: box(b).pop("crc32"), "missing key 'crc32'"),
        (lambda b: box(b).update(crc32=[1, 2]), "2 checksums"),
        (lambda b: box(b).update(shape=[2, 4]), "outside shape"),
        (lambda b: box(b).update(offset=[1, 0]), "outside shape"),
        (lambda b: box(b).update(offset=[0]), "of a tensor of shape"),
        (lambda b: box(b).update(bytes=20), "20 bytes for box"),
        (lambda b: box(b).update(start=72), "behind the end"),
        (lambda b: box(b).update(start=62), "not aligned"),
        (lambda b: box(b).update(file="other.safetensors"), "not listed"),
        (lambda b: b["tensors"]["model/w"].update(dtype="complex64"), "dtype 'complex64'"),
        (lambda b: b["files"].update({"../../etc/passwd": b["files"].pop(FILE)}), "file name"),
        (lambda b: b["files"].update({"..": b["files"][FILE]}), "file name"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change, complaint):
    with pytest.raises(CheckpointError, match=f"^here: not a whole manifest.*{complaint}"):
        Manifest.from_json(rewritten(change), "here")


def test_a_later_version_is_refused_as_such():
    with pytest.raises(CheckpointError, match="here: format version 2; this program reads 1"):
        Manifest.from_json(rewritten(lambda b: b.update(version=2)), "here")


def test_state_keeps_non_finite_floats_and_makes_lists_of_tuples():
    state = {"a": [math.inf, -math.inf], "t": (1, 2), "n": {"x": 0.1, "float": "nan"}}
    text = json.dumps(encode(state), allow_nan=False)
    assert decode(json.loads(text)) == {"a": [math.inf, -math.inf], "t": [1, 2], "n": {"x": 0.1, "float": "nan"}}
    assert math.isnan(decode(json.loads(json.dumps(encode(math.nan)))))


@pytest.mark.parametrize("state", [{1: 2}, {"a": object()}, {"a": {1, 2}}, {"a": [b"x"]}])
def test_state_that_json_cannot_say_is_refused(state):
    with pytest.raises(CheckpointError, match="checkpoint state"):
        encode(state)
