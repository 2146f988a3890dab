"""What DeepSpeed wants the process around it to be, given to it only while one of its calls runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dist_train.mesh.mesh import Group, ParallelMesh


class Groups:
    """The data ranks, in the words of Megatron-LM's `mpu`. Without it DeepSpeed makes a group with a timeout of its own."""

    def __init__(self, data: Group) -> None:
        self._data = data

    def get_data_parallel_group(self) -> Any:
        return self._data.process_group

    def get_data_parallel_rank(self) -> int:
        return self._data.index

    def get_data_parallel_world_size(self) -> int:
        return self._data.size

    def get_model_parallel_group(self) -> None:
        return None

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1


class Surroundings:
    """A context in which DeepSpeed finds the process as it wants it, and after which the process is as it was.

    Environment variables that its own launcher would set, its global `mpu`, and at stage 3 a `torch.nn.functional.linear` that
    keeps no gathered weight for backward.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self.groups = Groups(mesh.data)
        local_rank = os.environ.get("LOCAL_RANK", str(mesh.device.index or 0))
        local_size = os.environ.get("LOCAL_WORLD_SIZE", str(mesh.world.size))
        self._variables = {"DS_ACCELERATOR": mesh.device.type, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
        self._linear: Any = None
        self._before: list[tuple[dict[str, str | None], Any, Any]] = []

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Importing DeepSpeed and making an engine change more than what is known here: the whole environment is put back."""
        before, linear = dict(os.environ), nn.functional.linear
        os.environ.update(self._variables)
        try:
            from deepspeed.utils import groups

            mpu = groups.mpu
            try:
                yield
            finally:
                groups.mpu = mpu
        finally:
            nn.functional.linear = linear
            for name in set(os.environ) - set(before):
                del os.environ[name]
            os.environ.update(before)

    def surround(self, module: nn.Module, spare_weights: bool) -> None:
        """Let every forward of the module, with DeepSpeed's hooks on it, run inside."""
        if spare_weights:
            from deepspeed.runtime.zero.linear import zero3_linear_wrap

            self._linear = zero3_linear_wrap
        module.register_forward_pre_hook(lambda *_: self.__enter__(), prepend=True)
        module.register_forward_hook(lambda *_: self.__exit__(), always_call=True)

    def __enter__(self) -> None:
        from deepspeed.utils import groups

        self._before.append(({name: os.environ.get(name) for name in self._variables}, groups.mpu, nn.functional.linear))
        os.environ.update(self._variables)
        groups.mpu = self.groups
        nn.functional.linear = self._linear or nn.functional.linear

    def __exit__(self, *_: object) -> None:
        from deepspeed.utils import groups

        variables, groups.mpu, nn.functional.linear = self._before.pop()
        for name, value in variables.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
