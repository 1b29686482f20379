"""The environment of a process, read from variables that launchers document or, if they could be run, set."""

import dataclasses

import pytest

from echelon.common.errors import ConfigError
from echelon.strategies.cluster.environment import Environment, reconcile_environment
from echelon.strategies.cluster.hardware import Hardware
from echelon.strategies.cluster.launchers import detect_environment
from echelon.strategies.cluster.slurm import first_host

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29511",
}
# as srun documents them; four nodes with 2, 2, 2 and 1 tasks
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[003-005,009]",
    "SLURM_JOB_NODELIST": "node[001-009]",
    "SLURM_JOB_NAME": "train.sh",
}
# of mpirun 4.1.4 of Debian
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_ess_base_jobid": "2065760257",
    "PMIX_NAMESPACE": "2065760257",
    "PMIX_RANK": "1",
}
# of mpirun.mpich 4.0.2 of Debian
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "8"}
# of a worker of TorchTrainer, ray 2.60
RAY = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "0",
    "MASTER_ADDR": "192.0.2.2",
    "MASTER_PORT": "33069",
    "RAY_JOB_ID": "01000000",
    "RAY_RAYLET_PID": "7628",
}
KUBEFLOW = {
    "KUBERNETES_PORT": "tcp://10.96.0.1:443",
    "RANK": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Environment("none", 0, 0, 0, 1, 1, 1, "127.0.0.1", None, ("MASTER_ADDR", "NODE_RANK"))),
        (TORCHRUN, Environment("torchrun", 3, 1, 1, 4, 2, 2, "10.0.0.1", 29511)),
        (SLURM, Environment("srun", 5, 1, 2, 7, 2, 4, "node003", 19567)),
        (OPEN_MPI, Environment("mpirun", 1, 1, 0, 2, 2, 1, "127.0.0.1", 20611)),
        (MPICH, Environment("mpirun", 1, 1, 0, 2, 2, 1, "127.0.0.1", 29500)),
        (RAY, Environment("Ray Train", 1, 1, 0, 2, 2, 1, "192.0.2.2", 33069)),
        (KUBEFLOW, Environment("Kubeflow", 1, 0, 1, 3, 1, 3, "job-master-0", 23456)),
    ],
    ids=["none", "torchrun", "slurm", "open-mpi", "mpich", "ray", "kubeflow"],
)
def test_each_launcher_is_known_by_its_variables(environ, expected):
    found = detect_environment(environ)
    assert found == expected
    assert found.is_external == bool(environ)


@pytest.mark.parametrize(
    ("environ", "launcher", "rank"),
    [
        ({**SLURM, **KUBEFLOW, **TORCHRUN}, "torchrun", 3),
        ({**SLURM, **RAY}, "Ray Train", 1),
        ({**SLURM, "SLURM_PROCID": "0", **OPEN_MPI}, "mpirun", 1),
        ({**SLURM, **MPICH}, "mpirun", 1),
        ({**SLURM, "PMI_RANK": "0", "PMI_SIZE": "9"}, "srun", 5),
        ({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "7"}, "srun", 5),
        ({**KUBEFLOW, **OPEN_MPI}, "mpirun", 1),
        ({**KUBEFLOW, **TORCHRUN}, "torchrun", 3),
    ],
    ids=[
        "torchrun within srun",
        "Ray on SLURM",
        "mpirun on SLURM",
        "mpiexec.hydra on SLURM",
        "srun --mpi=pmi2",
        "a script that exports for torch",
        "MPIJob",
        "torchrun in a pod",
    ],
)
def test_the_innermost_launcher_counts(environ, launcher, rank):
    found = detect_environment(environ)
    assert (found.launcher, found.rank) == (launcher, rank)


def without(environ, *names, **values):
    return {name: value for name, value in {**environ, **values}.items() if name not in names}


ONE_TASK = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize(
    "environ",
    [
        without(SLURM, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
        without(SLURM, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", SLURM_PROCID="0", SLURM_LOCALID="0"),
        {**SLURM, **ONE_TASK, "SLURM_STEP_ID": "4294967290"},
        {**SLURM, **ONE_TASK, "SLURM_JOB_NAME": "bash"},
        {**SLURM, **ONE_TASK, "SLURM_JOB_NAME": "interactive"},
        {**SLURM, **ONE_TASK, "SLURM_PTY_PORT": "40000"},
        {**SLURM, "SLURM_PTY_PORT": "40000", "SLURM_JOB_NAME": "bash"},
    ],
    ids=["salloc", "sbatch", "interactive step", "srun bash", "named so", "srun --pty", "srun -n 7 --pty bash"],
)
def test_a_shell_on_a_slurm_cluster_is_no_launcher(environ):
    assert detect_environment(environ).launcher == "none"


def test_tasks_that_srun_starts_from_the_shell_of_salloc_belong_together():
    assert detect_environment({**SLURM, "SLURM_JOB_NAME": "interactive"}).world_size == 7


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("node[003-006,009]", "node003"),
        ("node[7]", "node7"),
        ("r[2,5]c[1-3],login", "r2c1"),
        ("gpu-a[01-02]-ib", "gpu-a01-ib"),
        ("a,b[1-2]", "a"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def test_slurm_without_counts_by_node_divides_its_tasks():
    environ = without(SLURM, "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS")
    found = detect_environment({**environ, "SLURM_NTASKS": "8", "SLURM_NNODES": "4"})
    assert (found.world_size, found.local_world_size, found.num_nodes) == (8, 2, 4)
    found = detect_environment({**environ, "SLURM_NTASKS": "6", "SLURM_NNODES": "3", "SLURM_NTASKS_PER_NODE": "2"})
    assert (found.world_size, found.local_world_size, found.num_nodes) == (6, 2, 3)


def test_slurm_on_one_node_meets_on_loopback_and_two_steps_do_not_meet():
    one_node = {**SLURM, "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "7"}
    first, second = detect_environment(one_node), detect_environment({**one_node, "SLURM_STEP_ID": "1"})
    assert first.main_address == "127.0.0.1"
    assert first.main_port != second.main_port


@pytest.mark.parametrize("environ", [SLURM, OPEN_MPI, MPICH], ids=["slurm", "open-mpi", "mpich"])
def test_the_users_meeting_point_wins(environ):
    found = detect_environment({**environ, "MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "4000"})
    assert (found.main_address, found.main_port) == ("10.1.1.1", 4000)


def test_jobs_of_mpirun_that_run_at_once_have_ports_of_their_own():
    ports = {detect_environment({**OPEN_MPI, "PMIX_NAMESPACE": f"{job << 16 | 1}"}).main_port for job in range(50)}
    assert len(ports) == 50
    assert all(15000 <= port < 25000 for port in ports)


def test_mpirun_on_two_nodes():
    environ = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "a"}
    found = detect_environment(environ)
    assert (found.rank, found.local_rank, found.node_rank, found.num_nodes) == (3, 1, 1, 2)


def test_variables_set_by_hand_need_no_torchrun():
    found = detect_environment(without(TORCHRUN, "TORCHELASTIC_RUN_ID", "GROUP_RANK", "GROUP_WORLD_SIZE"))
    assert found == detect_environment(TORCHRUN)


def test_ray_may_place_different_numbers_of_workers():
    environ = {**RAY, "RANK": "5", "LOCAL_RANK": "3", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "2"}
    assert detect_environment(environ).num_nodes == 3


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (without(TORCHRUN, "RANK"), "RANK is not set"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE='four' is not a number"),
        ({**TORCHRUN, "RANK": "4"}, "torchrun give rank 4 of 4, but .* from 0 to 3"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, "local_rank 1 of 1"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "9"}, r"9 tasks in total, \[2, 2, 2, 1\] on the 4 nodes"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2x3"}, "'2x3' does not have the form"),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"},
            "4 processes on 2 nodes, but MASTER_ADDR is not set",
        ),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "3"}, "2 of 3 processes on this node.*same number of slots"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}, "rank 2 as local_rank 1; .*by slot"),
        (without(KUBEFLOW, "KUBERNETES_PORT"), "RANK=1 and WORLD_SIZE=3 are set, but LOCAL_RANK or LOCAL_WORLD_SIZE"),
    ],
)
def test_contradictory_and_incomplete_variables_are_errors(environ, message):
    with pytest.raises(ConfigError, match=message):
        detect_environment(environ)


def test_a_world_of_one_by_hand_is_one_process():
    environ = {**without(KUBEFLOW, "KUBERNETES_PORT"), "RANK": "0", "WORLD_SIZE": "1"}
    assert not detect_environment(environ).is_external


# --- what the user asks for -------------------------------------------------------------------------------------------


def test_nobody_else_starts_the_processes_that_were_asked_for():
    found = reconcile_environment(detect_environment({}), 4, None)
    assert (found.rank, found.world_size, found.local_world_size, found.num_nodes) == (0, 4, 4, 1)
    assert reconcile_environment(detect_environment({}), None, None).world_size == 1


STATIC = {"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1"}


def test_nodes_that_are_started_one_by_one():
    found = reconcile_environment(detect_environment(STATIC), 3, 2)
    assert found == Environment("none", 3, 0, 1, 6, 3, 2, "10.0.0.1", 29500)
    environ = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7", "GROUP_RANK": "0"}
    found = reconcile_environment(detect_environment(environ), 3, 2)
    assert (found.rank, found.main_port) == (0, 7)


def test_a_run_on_one_machine_meets_on_loopback_at_any_port():
    environ = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0"}
    found = reconcile_environment(detect_environment(environ), 2, 1)
    assert (found.main_address, found.main_port) == ("127.0.0.1", None)


@pytest.mark.parametrize("environ", [TORCHRUN, KUBEFLOW, RAY], ids=["torchrun", "kubeflow", "ray"])
def test_numbers_that_the_user_leaves_open_are_the_launchers(environ):
    found = detect_environment(environ)
    assert reconcile_environment(found, None, None) is found
    assert reconcile_environment(found, found.local_world_size, found.num_nodes) is found


@pytest.mark.parametrize(
    ("environ", "devices", "nodes", "message"),
    [
        (TORCHRUN, 4, None, r"devices=4, but torchrun started 2 process\(es\) on this node"),
        (SLURM, None, 3, r"num_nodes=3, but srun started processes on 4 node\(s\)"),
        (OPEN_MPI, 2, 2, r"num_nodes=2, but mpirun started processes on 1 node\(s\)"),
        (KUBEFLOW, 2, 3, r"devices=2, but Kubeflow started 1 process\(es\)"),
        ({}, 2, 2, "num_nodes=2, but MASTER_ADDR and NODE_RANK are not set.*NODE_RANK to 0 ... 1"),
        ({"MASTER_ADDR": "a"}, 2, 3, "num_nodes=3, but NODE_RANK is not set .*echelon launch --nnodes 3"),
        ({**STATIC, "NODE_RANK": "2"}, 2, 2, "NODE_RANK=2, but num_nodes=2"),
        (STATIC, 2, None, "NODE_RANK=1, but num_nodes=1"),
        ({**STATIC, "NODE_RANK": "one"}, 2, 2, "NODE_RANK='one' is not a number"),
    ],
)
def test_contradictions_name_both_numbers(environ, devices, nodes, message):
    with pytest.raises(ConfigError, match=message):
        reconcile_environment(detect_environment(environ), devices, nodes)


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        (TORCHRUN, "4 processes on 2 nodes (2 each), started by torchrun; store at 10.0.0.1:29511"),
        (SLURM, "7 processes on 4 nodes (2 on this one), started by srun; store at node003:19567"),
        (OPEN_MPI, "2 processes, started by mpirun; store at 127.0.0.1:20611"),
        ({}, "1 process, started by Echelon"),
    ],
)
def test_one_line_describes_the_processes(environ, line):
    assert detect_environment(environ).describe() == line


def test_the_line_of_nodes_with_different_numbers_of_devices_counts_all():
    here = reconcile_environment(detect_environment({**STATIC, "NODE_RANK": "0"}), 2, 2)
    found = detect_environment({**TORCHRUN, "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2"})
    line = Hardware("cpu", (0, 1), 2, here).describe(found)
    assert line.startswith("5 processes on 2 nodes (2 on this one), started by Echelon; store at ")


def test_an_environment_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        detect_environment({}).rank = 1
