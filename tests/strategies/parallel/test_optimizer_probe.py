"""An optimizer that looks across parameters is refused where they are dealt out; others train as in one process."""

from pathlib import Path

import pytest
import torch
from as_rank import calm_down, double_trainer
from published_optimizers import SGDP, AdamP, CAdamW, Kron, Lamb, Lion, Mars, NovoGrad, PlainState, RowSums
from sweep import IS_SWEEP
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Adafactor, Muon
from torch.utils.data import DataLoader, TensorDataset

from echelon import ModelCheckpoint, ParallelStrategy, ParameterServerStrategy, TrainModule
from echelon.common.errors import ConfigError
from echelon.strategies.parallel.optimizer_probe import OptimizerProbe
from echelon.testing import run_ranks


class Base(torch.optim.Optimizer):
    """Plain gradient descent; subclasses change the gradients."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, change in zip(held, self.changes(held), strict=True):
            parameter.add_(change, alpha=-self.param_groups[0]["lr"])

    def changes(self, held):
        return [parameter.grad for parameter in held]


class ClipsAll(Base):
    """Divides by the norm over all gradients if it is above 1, as LAMB does."""

    def changes(self, held):
        norm = torch.stack([parameter.grad.square().sum() for parameter in held]).sum().sqrt()
        return [parameter.grad / norm.clamp(min=1.0) for parameter in held]


class SharesAStepSize(Base):
    """Has one step size for all parameters, from their largest gradient."""

    def changes(self, held):
        largest = max(parameter.grad.abs().max() for parameter in held)
        return [parameter.grad / largest for parameter in held]


class Draws(Base):
    """Adds noise, as Langevin dynamics does."""

    def changes(self, held):
        return [parameter.grad + 0.1 * torch.randn_like(parameter) for parameter in held]


class TrustsNorms(Base):
    """Scales each update by the norm of its parameter, as LARS and LAMB do."""

    def changes(self, held):
        return [parameter.grad * parameter.norm() / parameter.grad.norm() for parameter in held]


class Orthogonal(Base):
    """Orthogonalizes the updates of matrices, as Muon does."""

    def changes(self, held):
        return [p.grad @ (p.grad.T @ p.grad + torch.eye(p.shape[1])).inverse() if p.dim() > 1 else p.grad for p in held]


class OfShards(Base):
    """Scales by the norm of what this rank has."""

    def changes(self, held):
        local = [getattr(parameter.grad, "_local_tensor", parameter.grad) for parameter in held]
        return [parameter.grad / (1 + part.norm()) for parameter, part in zip(held, local, strict=True)]


class Counts(Base):
    """Counts its steps, with those of its copies."""

    steps = 0

    def changes(self, held):
        Counts.steps += 1
        return super().changes(held)


class Wraps(PlainState):
    """Cannot be tried, since it holds another optimizer."""

    def __init__(self, params):
        super().__init__(params)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)


class Net(TrainModule):
    def __init__(self, optimizer):
        super().__init__()
        torch.manual_seed(0)
        has_bias = optimizer is not Muon  # which takes matrices only
        rows = 2 if optimizer is RowSums else 1  # else rank 1 has nothing of the last layer
        layers = nn.Linear(3, 4, bias=has_bias), nn.Tanh(), nn.Linear(4, rows, bias=has_bias)
        self.layers, self.optimizer = nn.Sequential(*layers), optimizer

    def training_step(self, batch, batch_idx):
        return (self.layers(batch[0]) - 3).square().mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class OfStages(Net):
    """Tries an optimizer whose parameters are others on each rank, as those of stages: even shards, and uneven ones."""

    def on_train_start(self):
        mesh = init_device_mesh("cpu", (2,))
        sharded = [distribute_tensor(torch.ones(rows, 2), mesh, [Shard(0)]) for rows in (2, 3)]
        probe = OptimizerProbe(Base([nn.Parameter(sharded[self.trainer.global_rank])]))
        self.differs = probe.differs_if_sharded(self.trainer.strategy.ranks.all)


def fit(optimizer, strategy, ckpt_path=None, **settings):
    torch.set_default_dtype(torch.float64)
    made = {"pp": lambda: ParallelStrategy(pp=2), "ps": lambda: ParameterServerStrategy(2)}.get(
        strategy, lambda: strategy
    )()
    trainer = double_trainer(**{"max_epochs": 2, "strategy": made, "global_batch_size": 4, **settings})
    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    try:
        trainer.fit(Net(optimizer), DataLoader(TensorDataset(data), 2), ckpt_path=ckpt_path)
        return trainer.strategy.full_model_state()
    except ConfigError as error:
        return str(error)
    finally:
        torch.set_default_dtype(torch.float32)


REFUSED = [
    (ClipsAll, "zero", "otherwise if it has no others, as with a norm over all gradients; use strategy='ddp'"),
    (SharesAStepSize, "zero", "otherwise if it has no others"),
    *((Lamb, strategy, "otherwise if it has no others") for strategy in ("zero", "pp", "ps")),
    (Draws, "zero", "draws random numbers when it updates them, which would be others on each rank"),
    (SharesAStepSize, "fsdp", "fails on shards (RuntimeError: max(): Expected reduction dim"),
    (OfShards, "fsdp", "updates shards otherwise than whole parameters; use strategy='zero' or 'ddp'"),
    *((kind, "fsdp", "fails on shards (RuntimeError: aten.") for kind in (AdamP, *[SGDP, CAdamW] * IS_SWEEP, Kron)),
    (NovoGrad, "fsdp", "fails on shards (AssertionError); use strategy='zero' or 'ddp'"),
    (Adafactor, "fsdp", "fails on shards (RuntimeError: aten.pow_"),
    (Muon, "fsdp", "; use strategy='zero' or 'ddp', or an optimizer whose operations know DTensors"),
]
ACCEPTED = [
    (TrustsNorms, "pp"),
    (AdamP, "ps"),
    *((kind, "zero") for kind in (Base, TrustsNorms, Orthogonal, OfShards)),
    *((kind, "fsdp") for kind in (Base, ClipsAll, Lamb, Mars, PlainState, RowSums, *[TrustsNorms, Lion] * IS_SWEEP)),
    *((kind, "zero") for kind in (Kron, NovoGrad, Muon, PlainState)),
    *((kind, "zero") for kind in [AdamP, SGDP, CAdamW, Adafactor] * IS_SWEEP),
]


def fit_all(cases, folder):
    calm_down()
    found = {(kind.__name__, strategy): fit(kind, strategy) for kind, strategy in cases}
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor") as caught:
        fit(Wraps, "fsdp")
    fit(Counts, "pp")
    stages = OfStages(Base)
    double_trainer(max_epochs=1, strategy="ddp").fit(stages, DataLoader(TensorDataset(torch.ones(4, 3)), 2))
    return found | {
        "steps": Counts.steps,
        "stages": stages.differs,
        "notes": caught.value.__notes__,
        "resumed": resume(PlainState, folder),
    }


def resume(optimizer, folder):
    """Return the weights of a run that was resumed after its first epoch."""
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    fit(optimizer, "fsdp", max_epochs=1, enable_checkpointing=True, callbacks=[saver], default_root_dir=folder)
    return fit(optimizer, "fsdp", str(Path(folder) / "epoch=0-step=2.ckpt"), default_root_dir=folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    cases = [*ACCEPTED, *((kind, strategy) for kind, strategy, _ in REFUSED)]
    return run_ranks(fit_all, 2, cases, str(tmp_path_factory.mktemp("runs")))[0]


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "strategy", "text"), REFUSED)
def test_what_would_be_another_update_is_refused_by_name(found, kind, strategy, text):
    error = found[kind.__name__, strategy]
    assert error.startswith(f"strategy='{strategy}' ")
    assert kind.__name__ in error
    assert text in error


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "strategy"), ACCEPTED)
def test_others_train_as_in_one_process(found, kind, strategy):
    for name, value in fit(kind, "single").items():
        torch.testing.assert_close(found[kind.__name__, strategy][name], value, rtol=0, atol=1e-12)


def test_a_pipeline_tries_an_optimizer_on_whole_parameters_once(found):
    of_training, steps, scales, together, alone, sharded = 4, 3, 2, 1, 2, 1
    assert found["steps"] == of_training + steps * scales * (together + alone + sharded)


def test_stages_of_which_one_has_even_shards_try_as_often(found):
    assert found["stages"] is False


def test_an_optimizer_that_steps_on_plain_shards_resumes(found):
    for name, value in fit(PlainState, "single").items():
        torch.testing.assert_close(found["resumed"][name], value, rtol=0, atol=1e-12)


def test_the_error_of_an_optimizer_that_cannot_be_tried_names_the_way_out(found):
    (note,) = [note for note in found["notes"] if "DTensor" in note]
    assert note.startswith("Wraps stepped on DTensors, which its operations may not know; use strategy='zero' or 'ddp'")
