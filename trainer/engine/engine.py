"""Engine: strategy, precision and checkpoints for training loops that users write themselves."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.errors import ConfigError, RunError
from ...common.storage import AnyPath, any_path
from ...strategies import Strategy
from ...strategies.placed.placed import Placed
from ..checkpoint import make_writer, resolve_checkpoint
from ..checkpoint.manifest import Origin, read_manifest
from ..checkpoint.single_file import SingleFile
from ..data.seed import capture_rng, part_ranks
from ..metrics.gathering import gather_all_once
from ..module.loss import Loss, loss_of
from ..module.optimizers import ManagedOptimizer
from ..resume.find_checkpoint import read_checkpoint
from ..resume.run_state import of_data_ranks, put_generators_back
from .forgotten import refuse_optimizers, warn_of_loaders
from .prepared_loader import PreparedLoader
from .prepared_module import check_plain, prepare_module, unprepare_copy
from .prepared_optimizer import OptimizerSteps, adopt_parameters, check_optimizers
from .processes import EngineProcesses
from .saved_objects import OWN, Keeps, check_names, items_of, put_back, state_of


class Engine(EngineProcesses):
    """A strategy, a precision and checkpoints for your own training loop; its methods have Fabric's names.

    The optimizer steps equal those of a `Trainer`, and of one process: gradients are the mean over the samples of the
    global batch. With several processes, all methods except `print` and `autocast` are collective: every rank calls
    them, in the same order.

    Args:
        strategy: a strategy or its name. ``local_sgd``, ``elastic`` and ``dp`` need a Trainer.
        accelerator: ``auto``, ``cpu``, ``gpu``, or a type of device that torch has, as for the Trainer.
        devices: devices of a node: a count, indices, -1 for all, or ``auto``: as many as the strategy can use.
        num_nodes: the number of machines.
        precision: as for the Trainer.

    Raises:
        ConfigError: for invalid arguments, before any process is started.

    Example::

        engine = Engine(precision="bf16-mixed", devices=1)
        engine.launch()
        net = nn.Linear(4, 1)
        net, optimizer = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        loader = engine.setup_dataloaders(train_loader)
        for features, targets in loader:
            loss = nn.functional.mse_loss(net(features), targets)
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    """

    saves_single_files: ClassVar[bool] = False
    """Whether `save` writes one file, which ``torch.load`` reads, instead of a folder."""

    def __init__(
        self,
        *,
        strategy: str | Strategy = "auto",
        accelerator: str = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int = 1,
        precision: str | int = "32-true",
    ) -> None:
        super().__init__(
            strategy=strategy, accelerator=accelerator, devices=devices, num_nodes=num_nodes, precision=precision
        )
        self._placed: dict[object, Placed] = {}
        """The module, as it was set up, of each module and optimizer."""
        self._is_parted = self._has_looked = False
        self._replaced: dict[nn.Module, list[nn.Parameter]] = {}
        """The parameters that modules had before they were set up, until the first backward."""
        self._origin = Origin(secrets.token_hex(16))

    # --- the parts of a loop -----------------------------------------------------------------------------------------

    def init_module(self) -> AbstractContextManager[object]:
        """Return the context in which to build a module, for strategies that decide where its layers are built."""
        self._connect()
        return self.strategy.init_context()

    def setup(self, module: nn.Module, *optimizers: Optimizer, overlap: bool = True) -> Any:
        """Move, wrap or shard a module; return it, followed by its optimizers if there are any.

        It stays the same object, with the same names. Optimizers that were built before are updated to its parameters.

        Args:
            module: any ``nn.Module``; each can be set up once.
            optimizers: all optimizers of its parameters, and no others.
            overlap: synchronize gradients of replicas while a backward computes them, as DDP does. False: after each
                backward; needed for a module with buffers that runs several times before a backward, or if some
                parameters get no gradient.

        Raises:
            ConfigError: for a module that was already set up, or an optimizer that the strategy cannot use.
            ModuleError: for optimizers of other parameters.
        """
        check_plain(module)
        check_optimizers(optimizers, module, self._precision)
        self._connect()
        gather_all_once(self.strategy)
        strategy = self.strategy
        strategy.validate_module(module)
        names = {parameter: name for name, parameter in module.named_parameters(remove_duplicate=False)}
        if not (optimizers or self._has_looked):
            self._replaced[module] = list(names)
        placed = strategy.place(module, is_manual=not overlap)
        adopt_parameters(optimizers, names, module)
        prepare_module(placed, self._gradients, is_sharded=strategy.forward_is_collective)
        self._placed[module] = placed
        self._gradients.train(placed)
        if not self._is_parted:
            seed = strategy.ranks.all.broadcast(torch.initial_seed())
            part_ranks(strategy.devices, seed, strategy.data_rank)
            self._is_parted = True
        return (module, *self._set_up(placed, optimizers)) if optimizers else module

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Set up all optimizers of a module that was set up without them; return one optimizer or all."""
        held = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        placed = next((each for each in self._gradients.trained if not held.isdisjoint(each.module.parameters())), None)
        if placed is None or any(self._placed.get(each) is placed for each in self._optimizers()):
            raise ConfigError(
                "setup_optimizers must get all optimizers of one module that was passed to engine.setup alone, got "
                f"{len(optimizers)} of other modules; pass them to engine.setup(module, *optimizers)."
            )
        check_optimizers(optimizers, placed.module, self._precision)
        prepared = self._set_up(placed, optimizers)
        return prepared if len(prepared) > 1 else prepared[0]

    def _optimizers(self) -> list[object]:
        return [each for each in self._placed if not isinstance(each, nn.Module)]

    def _set_up(self, placed: Placed, optimizers: Sequence[Optimizer]) -> tuple[object, ...]:
        placed.take_optimizers(optimizers)
        self._placed.update(dict.fromkeys(optimizers, placed))
        return tuple(
            ManagedOptimizer(optimizer, OptimizerSteps(optimizer, placed, self._gradients, self.reduce))
            for optimizer in optimizers
        )

    def setup_dataloaders(
        self,
        *loaders: Any,
        accumulate_grad_batches: int = 1,
        global_batch_size: int | None = None,
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
    ) -> Any:
        """Return one loader or all, with batches that are divided among the ranks and on the device.

        Args:
            loaders: DataLoaders, or any iterables of batches. Distributed samplers are not needed.
            accumulate_grad_batches: the batches per optimizer step; `sync_gradients` is True for the last of them.
            global_batch_size: instead, the samples per optimizer step over all ranks; the loader's batch size is then
                the largest micro-batch.
            use_distributed_sampler: False leaves the division to your loaders: each rank's yields its own batches.
            move_to_device: move the batches to the device.

        Raises:
            DataError: for an object that is not a loader.
        """
        self._connect()
        for name, value in (
            ("accumulate_grad_batches", accumulate_grad_batches),
            ("global_batch_size", global_batch_size),
        ):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be an int of at least 1, got {value!r}; give one.")
        if global_batch_size is not None and accumulate_grad_batches != 1:
            raise ConfigError(
                f"global_batch_size={global_batch_size} derives the accumulation itself, but accumulate_grad_batches="
                f"{accumulate_grad_batches} is set too; give one of them."
            )
        seed = self.strategy.ranks.all.broadcast(torch.initial_seed())
        prepared = tuple(
            PreparedLoader(
                loader,
                self._gradients,
                accumulate=accumulate_grad_batches,
                global_batch_size=global_batch_size,
                seed=seed,
                is_dealing=use_distributed_sampler,
                moves=move_to_device,
            )
            for loader in loaders
        )
        return prepared if len(prepared) != 1 else prepared[0]

    # --- the step ----------------------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of the precision, for computations outside of a module, such as a loss or noise."""
        return self._precision.forward_context(self.device)

    def backward(self, loss: Tensor | Loss, *args: Any, **kwargs: Any) -> None:
        """Accumulate the gradients of a loss: the mean over the batch read last, or a `Loss` with a count of its own.

        It is weighted by the batch's share of the samples of the step; do not divide it by the accumulation. Without a
        prepared loader, all ranks have the same weight, and accumulated gradients are summed as they are. The other
        arguments are those of ``Tensor.backward``.

        Raises:
            ModuleError: for an object that is not a loss.
            RunError: if no module that was set up has computed anything.
        """
        is_plain = type(loss) is Tensor and loss.requires_grad and loss.ndim == 0  # nearly always, and quick to check
        is_given = is_plain or args or kwargs.get("gradient") is not None
        given = loss if is_given else loss_of(loss, where="The loss function")
        if given is None:
            raise ConfigError(
                f"engine.backward must get a loss, got {loss!r:.80}; pass what the loss function returned."
            )
        weighed = self._gradients.weigh(given)
        if not self._has_looked:
            self._look_for_forgotten()
        if self._precision.uses_scaler:
            weighed = self.strategy.site.scaling.scale(weighed)
        weighed.backward(*args, **kwargs)
        self._gradients.end_backward()
        torch.clear_autocast_cache()  # in a block of `autocast`, weights may change before the next forward

    def _look_for_forgotten(self) -> None:
        """Find, at the first backward, optimizers and loaders that were not set up."""
        self._has_looked = True
        known = self._optimizers()
        has_one = {id(self._placed[optimizer]) for optimizer in known}
        for placed in self._gradients.trained:
            if id(placed) not in has_one:
                parameters = [*placed.module.parameters(), *self._replaced.get(placed.module, ())]
                refuse_optimizers(known, parameters, type(placed.module).__name__)
        self._replaced.clear()
        if self.strategy.data_size > 1 and not self._gradients.has_batch:
            warn_of_loaders(self.strategy.data_size)

    @property
    def sync_gradients(self) -> bool:
        """Whether the batch read last is the last of its step: then clip, step and zero the gradients."""
        return self._gradients.syncs

    @contextmanager
    def no_backward_sync(self, module: nn.Module | None = None, enabled: bool = True) -> Iterator[None]:
        """Accumulate gradients without synchronizing them, in forward and backward of all but the last batch of a step.

        Prepared loaders with `accumulate_grad_batches` do this by themselves.
        """
        gradients = self._gradients
        modules = gradients.trained if module is None else [self._placed_of(module)]
        before = gradients.syncs
        gradients.sync(modules, before and not enabled)
        try:
            yield
        finally:
            gradients.sync(modules, before)

    @contextmanager
    def gathered(self, module: nn.Module) -> Iterator[nn.Module]:
        """Gather the weights of what was set up, or of a part of it, as ``trainer.strategy.gathered`` does. Collective.

        Raises:
            ConfigError: for a module that this engine has not set up, nor one that it is in.
        """
        placed = self._owner(module)
        if placed is None:
            owners = dict.fromkeys(self._placed.values())
            placed = next((p for p in owners if any(part is module for part in p.module.modules())), None)
        with (self._placed_of(module) if placed is None else placed).gathered(module) as copied:
            unprepare_copy(copied, module)
            yield copied

    def clip_gradients(
        self, optimizer: Any, *, max_norm: float | None = None, clip_val: float | None = None
    ) -> Tensor | None:
        """Clip the gradients of an optimizer by their norm, and return the norm before, or clip each by value."""
        if (max_norm is None) == (clip_val is None):
            raise ConfigError(
                f"clip_gradients must get one of max_norm and clip_val, got max_norm={max_norm} and "
                f"clip_val={clip_val}; give one of them."
            )
        limit = clip_val if max_norm is None else max_norm
        if limit is not None and not limit >= 0:
            raise ConfigError(
                f"clip_gradients must get a limit of at least 0, got {limit}, which would turn gradients around; give "
                "such a number."
            )
        placed, plain = self._placed_of(optimizer), self._plain(optimizer)
        self._gradients.check_ready(plain, "clip_gradients")
        self._gradients.correct(plain)
        placed.unscale(plain)
        if max_norm is not None:
            return placed.clip(plain, max_norm, "norm")
        assert clip_val is not None
        return placed.clip(plain, clip_val, "value")

    @property
    def num_skipped_steps(self) -> int:
        """Updates that were skipped because scaled gradients overflowed (16-mixed)."""
        self._gradients.finish_update()
        return self._gradients.num_skipped

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, path: str | AnyPath, state: Mapping[str, Any], filter: Mapping[str, Keeps] | None = None) -> None:
        """Write a checkpoint of modules, optimizers, loaders, other objects with a ``state_dict``, and plain values.

        It is a folder in the Trainer's format, without pickle; the loss scale and random generators are added.
        `load_weights` reads the weights saved under ``model``. Call it between two optimizer steps.

        Args:
            path: the folder, or its URL in a store.
            state: what is saved, by name.
            filter: for some of the names, a function that gets each key and value of its state, and returns whether it
                is saved.

        Raises:
            CheckpointError: for a value that a checkpoint cannot hold, or if it cannot be written.
            RunError: inside an optimizer step.

        Example::

            state = {"model": net, "optimizer": optimizer, "epoch": 3}
            engine.save("runs/loop", state)
            engine.load("runs/loop", state)
            state["epoch"]  # 3
        """
        self._connect()
        check_names(state, "engine.save")
        has_loader = any(isinstance(value, PreparedLoader) for value in state.values())
        self._gradients.forget_dropped()
        if self._gradients.is_inside_step:
            raise self._lost(path)
        if has_loader and self._gradients.has_unused_batch:
            self._lose_batch(path)
        self._gradients.finish_update()
        with torch.no_grad():
            saved = {name: state_of(value, self._owner, self._gradients.sync_replicas) for name, value in state.items()}
        for name, is_kept in (filter or {}).items():
            saved[name] = {key: value for key, value in items_of(saved, name) if is_kept(key, value)}
        saved["precision"] = self.strategy.site.scaling.scaler.state_dict()
        saved["rng"] = of_data_ranks(self.strategy, capture_rng(self.strategy.devices))
        self._origin = self._origin.after()
        writer = make_writer(self.strategy.ranks.group, is_async=False)
        single_file = SingleFile(tuple(state) or None) if self.saves_single_files else None
        writer.save(
            any_path("path", path), saved, mesh=self.strategy.mesh_axes, origin=self._origin, single_file=single_file
        )

    def load(
        self, path: str | AnyPath, state: MutableMapping[str, Any] | None = None, *, strict: bool = True
    ) -> dict[str, Any]:
        """Restore objects from what was saved under their names, on any number of ranks, and return the rest.

        Plain values are replaced in `state`. If the whole state is loaded, the random generators and the loss scale are
        restored as well. Nothing in the checkpoint is executed.

        Raises:
            CheckpointError: if it is missing, damaged, or does not fit.
        """
        self._connect()
        objects = {} if state is None else state
        check_names(objects, "engine.load")
        folder = self.strategy.ranks.all.on_first_rank(lambda: resolve_checkpoint(path))
        assert folder is not None
        large = [name for name, value in objects.items() if self._owner(value) is not None]
        saved = read_checkpoint(folder, self.strategy, large=large, checked=lambda *_: None)
        own = {name: saved.pop(name) for name in OWN if name in saved}
        put_back(objects, saved, self._owner, strict=strict)
        self._gradients.finish_update()
        if objects and own:
            if own["precision"] and self._precision.uses_scaler:
                self.strategy.site.scaling.scaler.load_state_dict(own["precision"])
            put_generators_back(self.strategy, own["rng"], torch.initial_seed(), 0)
        manifest = self.strategy.ranks.all.on_first_rank(lambda: read_manifest(folder))
        self._origin = self._origin.going_on_from(manifest)
        return saved

    def _lose_batch(self, path: str | AnyPath) -> None:
        """Refuse to save the position of a loader whose last batch has not been used."""
        raise self._lost(path)

    @staticmethod
    def _lost(path: str | AnyPath) -> RunError:
        return RunError(
            f"engine.save({str(path)!r}) was called inside an optimizer step, whose gradients or batch would be "
            "lost; call it after optimizer.step()."
        )

    def _owner(self, value: object) -> Placed | None:
        """Return what was set up of a module or an optimizer; None for anything else."""
        is_hashable = isinstance(value, nn.Module | Optimizer)
        return self._placed.get(self._plain(value)) if is_hashable else None

    def _placed_of(self, value: object) -> Placed:
        placed = self._owner(value)
        if placed is None:
            raise ConfigError(
                f"{type(value).__name__} was not set up by this engine; use what engine.setup(module, *optimizers) "
                "returned."
            )
        return placed

    @staticmethod
    def _plain(value: object) -> Any:
        """Return the optimizer inside the one that the user holds; return anything else as it is."""
        return value.optimizer if type(value) is ManagedOptimizer else value
