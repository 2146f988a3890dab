"""Whose rank are we? Decided from the environment alone."""

from __future__ import annotations

import pytest

from dist_train.config.compose import ConfigError
from dist_train.launcher.environment import Place, detect, threads_per_rank

SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}
OMPI = {f"OMPI_COMM_WORLD_{name}": n for name, n in {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}.items()}


def test_torchrun_gives_everything() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "9"}
    assert detect(env) == Place("torchrun", 5, 8, 1, 4, "h", 9)


def test_a_world_of_one_is_joined_only_under_torchrun_which_serves_the_store() -> None:
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}) == Place("torchrun", 0, 1, None, None, "127.0.0.1", None)
    assert detect({**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    assert detect({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) is None


def test_srun_meets_on_the_first_host_at_a_port_that_every_task_computes_alike() -> None:
    first = detect({**SLURM, "SLURM_STEP_NODELIST": "node[03-04]"})
    assert first is not None
    assert (first.by, first.rank, first.world_size, first.local_rank, first.address) == ("srun", 3, 4, 1, "node03")
    other = detect({**SLURM, "SLURM_STEP_NODELIST": "node[03-04]", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert other is not None and other.port == first.port
    assert first.port is not None and 20000 <= first.port < 32000
    next_job = detect({**SLURM, "SLURM_JOB_ID": "8"})
    assert next_job is not None and next_job.port != first.port


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"WORLD_SIZE": "4"},
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"},  # a batch script
        {**SLURM, "SLURM_PTY_PORT": "1"},  # an interactive shell
    ],
)
def test_no_job_to_join(env: dict[str, str]) -> None:
    assert detect(env) is None


def test_mpirun_inside_an_allocation_wins_over_the_numbers_of_the_helper_that_srun_started() -> None:
    place = detect({**SLURM, **OMPI, "SLURM_PROCID": "0"})
    assert place is not None
    assert (place.by, place.rank, place.world_size, place.address) == ("mpirun", 1, 4, "127.0.0.1")
    hydra = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
    place = detect({**SLURM, **hydra}, parent=11)
    assert place is not None and (place.by, place.rank, place.world_size, place.local_rank) == ("mpirun", 2, 3, 2)


def test_pmi_of_srun_itself_is_srun() -> None:
    place = detect({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"})
    assert place is not None and place.by == "srun"


def test_mpich_jobs_of_one_node_meet_at_different_ports() -> None:
    env = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    one, two = detect(env, parent=100), detect(env, parent=101)
    assert one is not None and two is not None and one.port != two.port


def test_several_hosts_without_an_address_are_told_apart() -> None:
    place = detect({**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert place is not None and place.address is None


NONSENSE = [{"RANK": "one", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, {**OMPI, "MASTER_PORT": "x"}]


@pytest.mark.parametrize("env", NONSENSE)
def test_nonsense_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="RANK|MASTER_PORT"):
        detect(env)


def test_U11_threads_per_rank() -> None:
    assert threads_per_rank({}, cores=8, ranks=2) == "4"
    assert threads_per_rank({}, cores=2, ranks=8) == "1"
    assert threads_per_rank({"OMP_NUM_THREADS": "3"}, cores=8, ranks=2) is None
