"""A model that from_pretrained builds trains under every layout, with one warning where load_pretrained would gain."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from programs import run_program

import echelon
from echelon import FSDPStrategy, ModuleError, ParallelStrategy
from echelon.strategies.module.deferred_init import DeferredInit
from echelon.strategies.pretrained.plain_builds import recording_builds
from echelon.testing import run_ranks

sys.path.append(str(Path(__file__).parent))
from test_training_pretrained import Finetuning, by_hand, double_trainer, train
from tiny_models import build, read, saved
from torch.utils.data import DataLoader, TensorDataset

transformers = pytest.importorskip("transformers")


class ReadInInit(Finetuning):
    """Reads the model in __init__."""

    def __init__(self, name, folder):
        super().__init__(name, folder)
        self.lm = read(name, folder).train()


def train_all(folder):
    torch.set_num_threads(1)
    results = {}
    layouts = {
        "ddp": "ddp",
        "fsdp deferred": FSDPStrategy(deferred_init=True),
        "tp": ParallelStrategy(tp=2),
        "pp deferred": ParallelStrategy(pp=2, deferred_init=True),
    }
    for name, strategy in layouts.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weights = train("llama", folder, strategy, reads=True)[1]
        results[name] = weights, [str(w.message) for w in caught if "from_pretrained" in str(w.message)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = ReadInInit("llama", folder)
        tokens = torch.zeros(4, 8, dtype=torch.long)
        double_trainer(strategy="fsdp", max_steps=1).fit(module, DataLoader(TensorDataset(tokens), 2))
    results["in __init__"] = None, [str(w.message) for w in caught if "from_pretrained" in str(w.message)]
    return results


def test_it_trains_as_by_hand_and_one_warning_names_the_gain(tmp_path):
    folder = saved("llama", tmp_path)
    results, others = run_ranks(train_all, 2, folder, timeout=300)
    for layout in ("ddp", "fsdp deferred", "tp", "pp deferred"):
        for key, value in by_hand("llama", folder).items():
            torch.testing.assert_close(results[layout][0][key], value, rtol=0, atol=1e-6, msg=f"{layout} {key}")
    assert not results["ddp"][1]  # each rank needs the whole model
    for layout in ("fsdp deferred", "tp", "pp deferred", "in __init__"):
        assert len(results[layout][1]) == 1, layout
        assert "echelon.load_pretrained(model, folder)" in results[layout][1][0]
        assert not others[layout][1]  # one for all ranks


def test_inside_of_a_deferred_initialization_it_reads_values_and_draws_nothing(tmp_path):
    folder, deferred = saved("gpt2", tmp_path), DeferredInit()
    state = torch.get_rng_state()
    with recording_builds(deferred):
        model, head = read("gpt2", folder), torch.nn.Linear(2, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert head.weight.is_meta
    for key, value in read("gpt2", folder).state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


LATE = """
import sys
import transformers
from echelon.strategies.module.deferred_init import DeferredInit
from echelon.strategies.pretrained.plain_builds import recording_builds

models = "transformers.modeling_utils"
assert models not in sys.modules
with recording_builds(DeferredInit()):
    assert models not in sys.modules, "importing it takes seconds"
    model = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1])
assert sum(float(p.detach().abs().sum()) for p in model.parameters()) > 0
assert sys.modules[models].PreTrainedModel.from_pretrained.__module__ == models
assert not any("ModelsOfTransformers" in type(finder).__name__ for finder in sys.meta_path)
"""


def test_transformers_models_are_imported_inside_only_if_the_program_does(tmp_path):
    done = run_program("-c", LATE, str(saved("llama", tmp_path)), folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_its_errors_are_those_of_transformers_and_it_is_itself_again_afterwards(tmp_path):
    original = vars(transformers.PreTrainedModel)["from_pretrained"]
    with (
        pytest.raises(OSError, match="not a local folder|does not appear|no file named"),
        recording_builds(DeferredInit()),
    ):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert vars(transformers.PreTrainedModel)["from_pretrained"] is original


def test_a_model_that_load_pretrained_filled_is_no_reason_to_warn(tmp_path):
    from echelon.strategies.distributed.ranks import Ranks
    from echelon.strategies.pretrained.whole_builds import warn_of_whole_builds

    class Two:
        world_size, rank = 2, 0

    ranks: Ranks = Two()
    folder = saved("llama", tmp_path)
    warn_of_whole_builds(echelon.load_pretrained(build("llama"), folder), "fsdp", ranks)
    with pytest.warns(UserWarning, match="LlamaForCausalLM.from_pretrained has built the whole model, of .* in each"):
        warn_of_whole_builds(read("llama", folder), "fsdp", ranks)


def test_a_meta_device_is_refused_where_transformers_cannot_be_stopped():
    with pytest.raises(ModuleError, match="echelon.load_pretrained"), DeferredInit().recording():
        torch.empty(2, device="meta")
