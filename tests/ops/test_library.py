"""A library that does not fit the package beside it is left alone, and said so."""

from __future__ import annotations

import pytest
import torch

from dist_train.ops import library

BUILT = pytest.mark.skipif(not library.loaded, reason=library.missing)


@BUILT
def test_the_operators_of_the_library_are_those_that_the_package_calls():
    found = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("dist_train::")}
    kernels = {name for name in found if not name.startswith("flash_")}  # those are written in Python
    assert library.OPERATORS == {name: library._arguments(name) for name in kernels}


@BUILT
@pytest.mark.parametrize("name, arguments", [("rms_norm", 4), ("operator_of_tomorrow", 1)])
def test_a_library_of_older_sources_is_not_used_and_the_remedy_told(monkeypatch, name, arguments):
    monkeypatch.setitem(library.OPERATORS, name, arguments)
    with pytest.warns(
        RuntimeWarning, match=rf"without its fused kernels.*other operators \({name}\): build it again.*make setup"
    ):
        loaded, missing = library._load()
    assert loaded is None and missing.startswith(str(library.PATH))


def test_a_file_that_is_no_library_is_not_used_and_the_remedy_told(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "PATH", tmp_path / "_csrc.so")
    assert "was not built" in library._load()[1]
    library.PATH.write_text("no library")
    with pytest.warns(RuntimeWarning, match="does not load into torch"):
        assert library._load()[0] is None


@BUILT
def test_the_library_that_fits_is_loaded_in_silence(recwarn):
    assert library._load()[1] == "" and not recwarn.list
