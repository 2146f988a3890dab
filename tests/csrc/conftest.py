from __future__ import annotations

import pytest

from dist_train.ops import library


@pytest.fixture(params=library.ISAS)
def isa(request):
    """Each instruction set that this processor has; where it lacks one, the best that it has once more."""
    if library.loaded:
        library.cpu_isa(request.param)
    yield request.param
    if library.loaded:
        library.cpu_isa()
