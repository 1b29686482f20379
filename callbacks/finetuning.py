"""BaseFinetuning and BackboneFinetuning: train with frozen layers first, and unfreeze them when an epoch begins."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.errors import ModuleError
from ..strategies.state.schema import INTEGER, NUMBER, TEXT, check_schema
from ..strategies.torch_internals.modules import BatchNorm
from .callback import Callback
from .run import Run

Modules = nn.Module | Iterable[Any]
"""A module, or modules in lists of any depth."""

_log = logging.getLogger(__name__)

_STATE: Final = {"epoch": INTEGER, "trainable": [TEXT], "groups": [[{"params": [TEXT]}]], "backbone_lr": (NUMBER, None)}


class BaseFinetuning(Callback):
    """Base of callbacks that freeze layers before training, and add them to the optimizer at the start of an epoch.

    Override `freeze_before_training` and `finetune_function`. ``configure_optimizers`` gives the optimizer the
    remaining parameters: ``filter(lambda p: p.requires_grad, self.parameters())``. A resumed run has the groups and the
    trainable parameters of the checkpoint. On several ranks all of them unfreeze the same, and the weights are those of
    one process. `OmitFrozenWeights` leaves a backbone out of checkpoints until it is unfrozen.

    Example::

        class UnfreezeAtOne(BaseFinetuning):
            def freeze_before_training(self, module):
                self.freeze(module.backbone)

            def finetune_function(self, module, epoch, optimizer):
                if epoch == 1:
                    self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=1e-3)

        class OfHead(Net):
            def configure_optimizers(self):
                return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1)

        Trainer(max_epochs=2, callbacks=UnfreezeAtOne()).fit(OfHead(), train_loader)
    """

    def __init__(self) -> None:
        self._epoch = -1
        self._trainable: list[str] = []
        self._groups: list[list[list[str]]] = []

    def freeze_before_training(self, pl_module: nn.Module) -> None:
        """Freeze, with `freeze`, what is not trained at first; called before ``configure_optimizers``."""
        raise NotImplementedError(f"{type(self).__name__} must define freeze_before_training(pl_module).")

    def finetune_function(self, pl_module: nn.Module, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze what is due with `unfreeze_and_add_param_group`; called for each optimizer when an epoch begins."""
        raise NotImplementedError(f"{type(self).__name__} must define finetune_function(pl_module, epoch, optimizer).")

    # --- hooks -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Freeze, before the optimizers are made."""
        if stage == "fit":
            self._epoch = -1
            self.freeze_before_training(module)

    def on_load_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Restore the optimizers' parameter groups, before their state is loaded."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if not trainer.optimizers or not state:
            return
        check_schema(state, _STATE, f"The saved state of {type(self).__name__}")
        parameters = dict(module.named_parameters())
        missing = [name for name in state["trainable"] if name not in parameters]
        if missing or len(state["groups"]) != len(trainer.optimizers):
            raise ModuleError(
                f"{type(self).__name__} had unfrozen {missing or 'parameters of other optimizers'}, which the module "
                "lacks; build it as it was."
            )
        trainable = set(state["trainable"])
        for part in module.modules():
            names = {name for name, parameter in parameters.items() if parameter in set(part.parameters(recurse=False))}
            if isinstance(part, BatchNorm) and names:
                part.track_running_stats = bool(names & trainable)
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trainable)
        for optimizer, groups in zip(trainer.optimizers, state["groups"], strict=True):
            del optimizer.param_groups[len(groups) :]  # groups of an epoch that is rolled back
            for group in groups[len(optimizer.param_groups) :]:
                optimizer.add_param_group({"params": [parameters[name] for name in group["params"]]})

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Call `finetune_function` for each optimizer, once per epoch."""
        if trainer.current_epoch == self._epoch:  # resumed inside it
            return
        for optimizer in trainer.optimizers:
            self.finetune_function(module, trainer.current_epoch, optimizer)
        self._epoch = trainer.current_epoch
        names = {parameter: name for name, parameter in module.named_parameters()}
        self._trainable = [name for parameter, name in names.items() if parameter.requires_grad]
        self._groups = [
            [[names[parameter] for parameter in group["params"] if parameter in names] for group in one.param_groups]
            for one in trainer.optimizers
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the trained parameters, by optimizer and group."""
        groups = [[{"params": names} for names in optimizer] for optimizer in self._groups]
        return {"epoch": self._epoch, "trainable": self._trainable, "groups": groups, "backbone_lr": None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore which parameters are trained."""
        check_schema(state_dict, _STATE, f"The saved state of {type(self).__name__}")
        self._epoch, self._trainable = state_dict["epoch"], list(state_dict["trainable"])
        self._groups = [[group["params"] for group in optimizer] for optimizer in state_dict["groups"]]

    # --- tools -------------------------------------------------------------------------------------------------------

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return the leaf modules, and the modules with parameters of their own."""
        if isinstance(modules, nn.ModuleDict):
            modules = modules.values()
        if isinstance(modules, Iterable):
            return [leaf for part in modules for leaf in BaseFinetuning.flatten_modules(part)]
        parts = modules.modules()
        return [part for part in parts if not list(part.children()) or list(part.parameters(recurse=False))]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters with this `requires_grad`, without those of batch norms if `train_bn` is False."""
        for part in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(part, BatchNorm):
                yield from (one for one in part.parameters(recurse=False) if one.requires_grad == requires_grad)

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze the parameters; batch norms track their statistics again."""
        _set_trainable(BaseFinetuning.flatten_modules(modules), True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the module's own parameters; a batch norm stops tracking its statistics."""
        _set_trainable([module], False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze the parameters; those of batch norms stay trainable, unless `train_bn` is False."""
        for part in BaseFinetuning.flatten_modules(modules):
            _set_trainable([part], isinstance(part, BatchNorm) and train_bn)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters that the optimizer does not have, and warn of those that it has."""
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        params = list(params)
        new = [parameter for parameter in params if parameter not in held]
        if len(new) < len(params):
            warnings.warn(
                f"{len(params) - len(new)} of {len(params)} unfrozen parameters are already in "
                f"{type(optimizer).__name__}, and are not added again. Did you init your optimizer in "
                "configure_optimizers with all parameters? Give it only those with requires_grad=True.",
                stacklevel=2,
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules, and add their parameters to the optimizer as a group.

        Its learning rate is `lr`, by default that of the first group divided by `initial_denom_lr`.
        """
        BaseFinetuning.make_trainable(modules)
        params = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
        new = BaseFinetuning.filter_on_optimizer(optimizer, params)
        if new:
            rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
            optimizer.add_param_group({"params": new, "lr": rate})


def multiplicative(epoch: int) -> float:
    """Return 2: the backbone's rate doubles each epoch."""
    return 2.0


class BackboneFinetuning(BaseFinetuning):
    """Freeze ``module.backbone`` until an epoch, then train it with a growing learning rate of its own.

    Args:
        unfreeze_backbone_at_epoch: the epoch, from 0, at the start of which the backbone is unfrozen.
        lambda_func: returns the factor by which the backbone's learning rate grows in an epoch.
        backbone_initial_ratio_lr: its first learning rate, as a fraction of that of the first group.
        backbone_initial_lr: its first learning rate itself, instead.
        should_align: whether its learning rate stops growing at that of the first group.
        initial_denom_lr: as in `unfreeze_and_add_param_group`; unused, since the backbone's learning rate is known.
        train_bn: whether to train its batch norms, from the first epoch on; otherwise they stay as they are.
        verbose: log (level INFO) both learning rates when they change.
        rounding: the number of digits to log.

    Example::

        class OfHead(Net):
            def configure_optimizers(self):
                return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1)

        Trainer(max_epochs=2, callbacks=BackboneFinetuning(unfreeze_backbone_at_epoch=1)).fit(OfHead(), train_loader)
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        *,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr, self.backbone_initial_lr = backbone_initial_ratio_lr, backbone_initial_lr
        self.should_align, self.initial_denom_lr, self.train_bn = should_align, initial_denom_lr, train_bn
        self.verbose, self.rounding = verbose, rounding
        self.previous_backbone_lr: float | None = None

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Freeze the backbone.

        Raises:
            ModuleError: if the module has no submodule ``backbone``.
        """
        if not isinstance(getattr(module, "backbone", None), nn.Module):
            raise ModuleError(
                f"BackboneFinetuning needs a module {type(module).__name__}.backbone; give the backbone that name."
            )
        super().setup(trainer, module, stage)
        if stage == "fit":
            self.previous_backbone_lr = None
            if 0 <= trainer.max_epochs <= self.unfreeze_backbone_at_epoch and trainer.is_global_zero:
                warnings.warn(
                    f"BackboneFinetuning(unfreeze_backbone_at_epoch={self.unfreeze_backbone_at_epoch}) never unfreezes "
                    f"the backbone in max_epochs={trainer.max_epochs}, whose epochs count from 0; lower it, or train "
                    "longer.",
                    stacklevel=2,
                )

    def freeze_before_training(self, pl_module: nn.Module) -> None:
        self.freeze(pl_module.get_submodule("backbone"), train_bn=self.train_bn)

    def finetune_function(self, pl_module: nn.Module, epoch: int, optimizer: Optimizer) -> None:
        rate = optimizer.param_groups[0]["lr"]
        if epoch == self.unfreeze_backbone_at_epoch:
            first = self.backbone_initial_lr
            self.previous_backbone_lr = rate * self.backbone_initial_ratio_lr if first is None else first
            self.unfreeze_and_add_param_group(
                pl_module.get_submodule("backbone"), optimizer, self.previous_backbone_lr, train_bn=self.train_bn
            )
        elif epoch > self.unfreeze_backbone_at_epoch and self.previous_backbone_lr is not None:
            grown = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            self.previous_backbone_lr = min(grown, rate) if self.should_align else grown
            optimizer.param_groups[-1]["lr"] = self.previous_backbone_lr
        if self.verbose and self.previous_backbone_lr is not None:
            rates = round(rate, self.rounding), round(self.previous_backbone_lr, self.rounding)
            _log.info("Learning rate %g, backbone %g", *rates)

    def state_dict(self) -> dict[str, object]:
        return {**super().state_dict(), "backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.previous_backbone_lr = state_dict["backbone_lr"]


def _set_trainable(parts: Iterable[nn.Module], is_trainable: bool) -> None:
    for part in parts:
        if isinstance(part, BatchNorm):
            part.track_running_stats = is_trainable
        for parameter in part.parameters(recurse=False):
            parameter.requires_grad_(is_trainable)
