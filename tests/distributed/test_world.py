"""Ranks, numbers of processes and machines are read from the environment that a launcher sets."""

from dataclasses import replace

import pytest

from trainable_candle.distributed.world import World, from_environment, machine_from_environment
from trainable_candle.errors import ConfigError

ADDRESS = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def test_without_a_launcher_or_with_one_process_there_is_no_world() -> None:
    assert from_environment({}) is None
    # Container images for clusters often set these two variables, even if no launcher runs.
    assert from_environment({"RANK": "0", "WORLD_SIZE": "1"}) is None
    # SLURM also sets these variables for the batch script, which is not a process of the run. Only
    # the processes that srun starts have SLURM_STEP_ID too.
    assert from_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        {
            "PMI_RANK": "3",
            "PMI_SIZE": "4",
            "PMI_ID": "3",  # the number of the process, not the name of the job
            "MPI_LOCALRANKID": "1",
            "MPI_LOCALNRANKS": "2",
        },
        {
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": "3",
            "SLURM_NTASKS": "4",
            "SLURM_LOCALID": "1",
            "SLURM_NTASKS_PER_NODE": "2",
        },
    ],
    ids=["torchrun", "Open MPI", "MPICH", "srun"],
)
def test_rank_and_size_are_read_from_each_launcher(variables: dict[str, str]) -> None:
    # torchrun itself listens at MASTER_PORT, so the ranks meet at the next port.
    expected = World(rank=3, size=4, local_rank=1, local_size=2, address=("node1", 29501), job="")
    assert from_environment({**variables, **ADDRESS}) == expected


def test_port_and_job_or_the_whole_address_can_be_set() -> None:
    rank_1 = {"RANK": "1", "WORLD_SIZE": "2", **ADDRESS}
    world = from_environment({**rank_1, "TRAINABLE_CANDLE_PORT": "7000", "SLURM_JOB_ID": "17"})
    assert world is not None
    assert (world.address, world.job) == (("node1", 7000), "17")
    # The path of a socket replaces host and port.
    world = from_environment({**rank_1, "TRAINABLE_CANDLE_RENDEZVOUS": "/a place"})
    assert world is not None
    assert world.address == "/a place"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x', expected a number"),
        ({"RANK": "2", "WORLD_SIZE": "2", **ADDRESS}, "RANK is 2, expected below WORLD_SIZE, 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", **ADDRESS, "TRAINABLE_CANDLE_JOIN_SECONDS": "1m"},
            "TRAINABLE_CANDLE_JOIN_SECONDS is '1m', expected a whole number of seconds",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "TRAINABLE_CANDLE_RENDEZVOUS": "host"},
            "expected /path or host:port",
        ),
    ],
    ids=["no size", "text as rank", "rank too large", "no address", "time", "address"],
)
def test_missing_or_wrong_variables_are_an_error(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_environment(variables)


def test_a_process_takes_the_gpu_of_its_local_rank_or_the_only_visible_one() -> None:
    world = World(rank=5, size=8, local_rank=1, local_size=4, address=("node1", 1), job="")
    # The argument of `device` is the number of GPUs that the process sees.
    assert world.device(4) == "cuda:1"
    assert world.device(1) == "cuda:0"
    with pytest.raises(ConfigError, match="process 3 of its machine, which shows 2 GPUs"):
        replace(world, rank=3, size=4, local_rank=3).device(2)


def test_index_and_number_of_machines_are_read() -> None:
    assert machine_from_environment({}) == (0, 1)
    assert machine_from_environment({"NNODES": "4", "NODE_RANK": "3"}) == (3, 4)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NODE_RANK": "1"}, "NNODES is not set, expected a number"),
        ({"NNODES": "2"}, "NODE_RANK is not set, expected a number"),
        ({"NNODES": "two", "NODE_RANK": "1"}, "NNODES is 'two', expected a number"),
        ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK is 2, expected below NNODES, 2"),
    ],
    ids=["count missing", "index missing", "count is text", "index too large"],
)
def test_missing_or_wrong_variables_of_machines_are_an_error(
    variables: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        machine_from_environment(variables)
