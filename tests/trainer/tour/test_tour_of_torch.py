"""A tour of mistakes that torch reports in its own words, to which a remedy is added; within 15 seconds each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet, samples
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset
from tour import Mistake, Tour

from echelon import DDPStrategy, FSDPStrategy, TrainModule

tour = Tour()
Loss = Callable[[nn.Module, Any], Any]


def fit(module: Any, data: Any = None, **settings: Any) -> None:
    quiet(**{"max_epochs": 1, **settings}).fit(module, loader() if data is None else data)


def batches(*tensors: torch.Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), 2)


class Step(Regression):
    """A regression, or with several classes a classifier, with this loss."""

    def __init__(self, loss: Loss, num_outputs: int = 1) -> None:
        super().__init__()
        self.net = nn.Linear(2, num_outputs)
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self, batch)


def cross_entropy(module: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


# --- the batch: each answer shows what it was made of ---


@tour.answered_by(RuntimeError, "Long", "target.long()", "[0] float32[2, 2], [1] float32[2]")
def classes_as_floats() -> None:
    fit(Step(cross_entropy, 3), batches(torch.ones(4, 2), torch.ones(4)))


@tour.answered_by(
    IndexError, "Target 5 is out of bounds", "Class indices go from 0", "micro-batch 1 of epoch 0", "int64[2]"
)
def a_class_too_many() -> None:
    fit(Step(cross_entropy, 3), batches(torch.ones(4, 2), torch.tensor([0, 1, 5, 2])))


@tour.answered_by(ValueError, "batch_size (2) to match target batch_size (1)", "one target for each row", "[:, :-1]")
def fewer_targets_than_rows() -> None:
    def loss(module: nn.Module, batch: Any) -> Any:
        return cross_entropy(module, (batch[0], batch[1][:-1]))

    fit(Step(loss, 3), batches(torch.ones(4, 2), torch.tensor([0, 1, 2, 2])))


class Embedded(Step):
    """A step whose input is looked up."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(cross_entropy, 3)
        self.net = nn.Sequential(nn.Embedding(4, 2, dtype=dtype), nn.Linear(2, 3))


@tour.answered_by(IndexError, "index out of range", "the tokenizer that belongs to the model", "its positions")
def tokens_of_another_tokenizer() -> None:
    fit(Embedded(), batches(torch.tensor([0, 1, 9, 2]), torch.zeros(4).long()))


@tour.answered_by(RuntimeError, "the same dtype", "need one dtype", "bf16-mixed")
def a_body_of_another_dtype_than_the_head() -> None:
    fit(Embedded(torch.bfloat16), batches(torch.tensor([0, 1, 3, 2]), torch.zeros(4).long()))


@tour.answered_by(RuntimeError, "(2x3 and 2x1)", "in_features", "flatten(1)", "[0] float32[2, 3]")
def inputs_of_another_width() -> None:
    fit(Regression(), batches(torch.ones(4, 3), torch.ones(4, 1)))


@tour.answered_by(RuntimeError, "Byte and Float", "batch.float()", "[0] uint8[2, 2]")
def images_of_bytes() -> None:
    fit(Regression(), batches(torch.ones(4, 2, dtype=torch.uint8), torch.ones(4, 1)))


class Named(Dataset[Any]):
    """Samples that are dicts."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(2), "y": torch.ones(1)}


@tour.answered_by(KeyError, "0", "['x'] float32[2, 2], ['y'] float32[2, 1]")
def a_dict_that_is_read_by_position() -> None:
    fit(Regression(), DataLoader(Named(), 2))


@tour.answered_by(TypeError, "not subscriptable", "The batch of micro-batch 0 of epoch 0 is None", "its collate_fn")
def a_collate_function_that_returns_nothing() -> None:
    fit(Regression(), DataLoader(samples(), 2, collate_fn=lambda items: None))


@tour.answered_by(TypeError, "must be Tensor, not list", "[0][0] float32[2, 2]", "[1][1] float32[2, 1]")
def a_validation_loader_beside_the_training_loader() -> None:
    fit(Regression(), (loader(), loader()))


class Short(Dataset[Any]):
    """It has fewer samples than it says."""

    def __init__(self) -> None:
        self.items = [(torch.ones(2), torch.ones(1))] * 4

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


@tour.answered_by(IndexError, "out of range", "samples [4, 5] of the training data")
def a_data_set_that_is_shorter_than_it_says() -> None:
    fit(Regression(), DataLoader(Short(), 2))


class Unsized(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.ones(2), torch.ones(1)


@tour.answered_by(TypeError, "'Unsized' has no len()", "needs __len__", "IterableDataset")
def a_data_set_without_a_length() -> None:
    fit(Regression(), DataLoader(Unsized(), 2))


# --- devices, gradients, layers ---


if not torch.cuda.is_available():
    no_gpu = RuntimeError if torch.version.cuda else AssertionError

    @tour.answered_by(no_gpu, "remove .cuda()", "device=self.device")
    def a_batch_sent_to_a_gpu() -> None:
        fit(Step(lambda module, batch: module(batch[0].cuda()).mean()))


@tour.answered_by(RuntimeError, "does not require grad", "not in an evaluation", "Trainer(inference_mode=False)")
def backward_in_a_validation() -> None:
    class Backward(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self(batch[0]).sum().backward()

    quiet(max_epochs=1).fit(Backward(), loader(), loader())


@tour.answered_by(RuntimeError, "a second time", "detach() what is kept from one step to the next")
def a_hidden_state_with_its_graph() -> None:
    class Keeps(Regression):
        kept: Any = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.kept = self.kept + self(batch[0]).mean()
            return self.kept

    fit(Keeps())


@tour.answered_by(RuntimeError, "inplace operation", "clone() it", "detect_anomaly=True")
def a_change_in_place() -> None:
    fit(Step(lambda module, batch: module(batch[0]).sigmoid().add_(0).mul_(2).mean()))


@tour.answered_by(NotImplementedError, '"forward" function', "self.net(x), or define forward(self, x)")
def a_module_without_forward() -> None:
    class Bare(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=0.1)

    fit(Bare())


@tour.answered_by(
    AttributeError, "'NoneType' object has no attribute 'experiment'", "Trainer(logger=CSVLogger('logs'))"
)
def an_experiment_without_a_logger() -> None:
    fit(Step(lambda module, batch: module.logger.experiment.add_scalar("a", 1)))


@tour.answered_by(TypeError, "forward() missing", "'y'", "got Tensor", "define predict_step(self, batch, batch_idx)")
def a_prediction_by_a_forward_of_two_arguments() -> None:
    class Two(Regression):
        def forward(self, x: Any, y: Any) -> Any:  # type: ignore[override]
            return self.net(x + y)

    quiet().predict(Two(), loader())


# --- optimizers ---


class Configured(Regression):
    def __init__(self, configure: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.configure = configure

    def configure_optimizers(self) -> Any:
        return self.configure(self)


@tour.answered_by(TypeError, "'Linear' object is not iterable", "such as self.parameters()")
def a_layer_for_parameters() -> None:
    fit(Configured(lambda module: Adam(module.net)))


@tour.answered_by(TypeError, "not supported between instances of 'float' and 'str'", "lr=0.1, not '0.1'")
def a_learning_rate_that_is_a_string() -> None:
    fit(Configured(lambda module: Adam(module.parameters(), lr="1e-3")))  # type: ignore[arg-type]


@tour.answered_by(ValueError, "empty parameter list", "or a filter left none")
def a_filter_that_leaves_no_parameter() -> None:
    fit(Configured(lambda module: SGD([each for each in module.parameters() if each.ndim > 5], lr=0.1)))


@tour.answered_by(ValueError, "total steps is 2", "total_steps=int(self.trainer.estimated_stepping_batches)")
def a_schedule_that_is_too_short() -> None:
    def configure(module: nn.Module) -> Any:
        optimizer = SGD(module.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.1, total_steps=2), "interval": "step"}]

    fit(Configured(configure))


@tour.answered_by(UserWarning, "no optimizer has stepped in the 4 batches", "self.optimizers().step()")
def manual_optimization_without_a_step() -> None:
    class Manual(Regression):
        automatic_optimization = False

    fit(Manual())


# --- several processes ---


@tour.answered_by(AssertionError, "does not support deepcopy", "in __init__ or configure_model", "EMAWeightAveraging")
def an_average_of_sharded_layers() -> None:
    class Averaged(Regression):
        def on_fit_start(self) -> None:
            self.average = AveragedModel(self.net)

    module = Averaged()
    module.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    fit(module, strategy=FSDPStrategy(policy=[nn.Sequential]), devices=2)


@tour.answered_by(RuntimeError, "ready only once", "use_reentrant=False", "static_graph=True")
def a_reentrant_checkpoint_beside_the_search_for_unused_parameters() -> None:
    class Checkpointed(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = checkpoint(self.net, batch[0].requires_grad_(), use_reentrant=True)
            return checkpoint(self.net, hidden.expand(-1, 2), use_reentrant=True).square().mean()

    fit(Checkpointed(), strategy=DDPStrategy(find_unused_parameters=True), devices=2)


@tour.answered_by(ValueError, "SyncBatchNorm", "GroupNorm", "sync_batchnorm=True")
def synchronized_norms_on_cpus() -> None:
    module = Regression()
    module.net = nn.Sequential(nn.SyncBatchNorm(2), nn.Linear(2, 1))
    fit(module, strategy="ddp", devices=2)


def test_an_optimizer_that_steps_by_itself_counts_as_a_step(tmp_path: Path) -> None:
    class Own(Regression):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx).backward()
            self.own.step()
            self.own.zero_grad()

        def configure_optimizers(self) -> Any:
            self.own = SGD(self.parameters(), lr=0.1)
            return self.own

    fit(Own())  # warnings are errors here


@pytest.mark.timeout(60)
@tour.cases
def test_a_mistake_that_torch_answers_has_a_remedy(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mistake.check()
