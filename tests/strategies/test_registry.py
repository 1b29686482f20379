"""The strategy and the devices of a run, from their names and from the launcher; and unknown names."""

import pytest

from echelon import DDPStrategy, ElasticStrategy, FSDPStrategy, LocalSGDStrategy, Trainer
from echelon.common.errors import ConfigError
from echelon.strategies import Precision, place
from echelon.strategies.placement import BY_NAME

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def under_torchrun(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("strategy", "devices", "num_nodes", "found", "processes"),
    [
        ("auto", "auto", 1, "single", 1),
        ("auto", 1, 1, "single", 1),
        ("auto", 3, 1, "ddp", 3),
        ("ddp", "auto", 1, "ddp", 1),
        ("ddp", 2, 1, "ddp", 2),
        ("dp", 2, 1, "dp", 1),
    ],
)
def test_numbers_of_devices_say_which_strategy_and_how_many_processes(strategy, devices, num_nodes, found, processes):
    chosen, hardware = place(strategy, "cpu", devices, num_nodes)
    chosen.validate(hardware, Precision("32-true"))
    assert chosen.name == found
    assert hardware.environment.world_size == processes
    assert chosen.launcher.starts_processes == (processes > 1)


def test_several_nodes_are_ddp_once_they_know_where_to_meet(monkeypatch):
    with pytest.raises(ConfigError, match="MASTER_ADDR and NODE_RANK are not set"):
        place("auto", "cpu", 2, 2)
    for name, value in {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    chosen, hardware = place("auto", "cpu", 2, 2)
    chosen.validate(hardware, Precision("32-true"))
    assert chosen.name == "ddp"
    assert (hardware.environment.world_size, chosen.rank) == (4, 2)


def test_processes_that_exist_are_not_started_and_are_taken_as_they_are(under_torchrun):
    chosen, hardware = place("auto", "cpu", "auto", 1)
    chosen.validate(hardware, Precision("32-true"))
    assert (chosen.name, len(hardware.devices), chosen.launcher.starts_processes) == ("ddp", 2, False)


def test_a_contradiction_to_the_launcher_names_both_numbers(under_torchrun):
    with pytest.raises(ConfigError, match=r"devices=4, but torchrun started 2 process"):
        Trainer(strategy="ddp", accelerator="cpu", devices=4)
    with pytest.raises(ConfigError, match=r"num_nodes=3, but torchrun started processes on 1 node"):
        Trainer(strategy="ddp", accelerator="cpu", num_nodes=3)
    with pytest.raises(ConfigError, match=r"strategy='single' runs in one process, but there are 2 .*, or start one"):
        Trainer(strategy="single", accelerator="cpu", devices=1, num_nodes=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"process_group_backend": "nccl"}, "process_group_backend='nccl' needs GPUs, got accelerator='cpu'"),
        ({"process_group_backend": "mpi"}, "process_group_backend='mpi', but this build of torch .* use 'gloo'"),
        ({"process_group_backend": "glo"}, "Did you mean 'gloo'"),
        ({"timeout": 30}, "timeout must be a timedelta above zero, got 30; give timedelta"),
        ({"timout": None}, r"DDPStrategy has no argument 'timout' \(given as None\). Did you mean 'timeout'"),
        ({"static_graph": True, "find_unused_parameters": True}, "cannot be combined"),
        ({"comm_hook": "fp8"}, "comm_hook='fp8' is not known; choose one of fp16, bf16, powersgd"),
        ({"sync_batchnorm": True}, "sync_batchnorm=True needs GPUs"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_a_process_starts(settings, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(strategy=DDPStrategy(**settings), accelerator="cpu", devices=2)


def test_lightnings_names_of_what_is_here_are_known():
    def chosen(name):
        return Trainer(strategy=name, accelerator="cpu", devices=1, barebones=True).strategy

    for name in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook"):
        assert (chosen(name).name, chosen(name).options.find_unused_parameters) == ("ddp", False)
        assert not chosen(f"{name}_find_unused_parameters_false").options.find_unused_parameters
        assert chosen(f"{name}_find_unused_parameters_true").options.find_unused_parameters
    assert chosen("single_device").name == "single"
    assert chosen("fsdp_cpu_offload").options.cpu_offload


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("deepspeed", "does not have Lightning's strategy='deepspeed'; use 'fsdp' instead"),
        ("deepspeed_stage_1_offload", "does not have Lightning's strategy='deepspeed_stage_1_offload'; use 'zero'"),
        ("deepspeed_stage_3", "use 'fsdp' instead"),
        ("xla", "use 'ddp' instead"),
        ("single_xla", "use 'single' instead"),
        ("model_parallel", "use 'tp' instead"),
        ("dddp", "strategy='dddp' is not a known strategy. Did you mean 'ddp'"),
        ("quantum", f"Choose one of: {', '.join(sorted([*BY_NAME, 'auto']))}"),
        (DDPStrategy, r"got the class DDPStrategy; write strategy=DDPStrategy\(\)"),
        (["ddp"], r"strategy must be one strategy, got a list, \['ddp'\]; write it without the list"),
        (None, "got None; use one of single"),
    ],
)
def test_what_is_no_strategy_is_refused_with_the_nearest_one(strategy, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(strategy=strategy, accelerator="cpu")


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (
            "dp",
            "inner must be a strategy whose workers can be started again, got 'dp'; use one of ddp, zero, fsdp, hsdp",
        ),
        ("single", "got 'single'; use one of ddp"),
        (LocalSGDStrategy(), "got 'local_sgd'; use one of ddp"),
        (ElasticStrategy("ddp"), "got 'elastic'; use one of ddp"),
        ("fdsp", "inner='fdsp' is not a known strategy. Did you mean 'fsdp'"),
        (FSDPStrategy, r"write inner=FSDPStrategy\(\)"),
    ],
)
def test_what_an_elastic_strategy_cannot_contain_is_refused_with_what_it_can(inner, message):
    with pytest.raises(ConfigError, match=message):
        ElasticStrategy(inner)


def test_an_elastic_strategy_contains_what_the_registry_knows():
    assert ElasticStrategy("hsdp").inner.replicate == "nodes"
    assert ElasticStrategy("ddp_find_unused_parameters_true").inner.options.find_unused_parameters
