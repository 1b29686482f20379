"""Arguments of a Trainer, as editors and type checkers read them: by name, with their types, defaults and meanings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec

from ...callbacks.callback import Callback
from ...callbacks.run import Logger
from ...strategies import ActivationCheckpointing, Strategy
from .profiler import Profiler
from .settings import Settings, make_settings

P = ParamSpec("P")


def _accept_settings(
    described: Callable[Concatenate[TrainerArguments, P], None],
) -> Callable[Concatenate[TrainerArguments, P], None]:
    """Have a constructor, whose signature and docstring are for readers, check what it is given, and begin with it.

    At run time the signature is that of `Settings`, by which config files and command lines find the types.
    """

    @functools.wraps(described)
    def __init__(self: TrainerArguments, /, *args: P.args, **kwargs: P.kwargs) -> None:
        self._begin(make_settings(args, dict(kwargs)))

    signature = inspect.signature(Settings)
    myself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    __init__.__signature__ = signature.replace(parameters=[myself, *signature.parameters.values()])  # type: ignore[attr-defined]
    return __init__


class TrainerArguments:
    """The constructor of a Trainer, which checks its arguments as `Settings`, and begins with these."""

    def _begin(self, settings: Settings) -> None:
        """Begin with checked settings; the Trainer overrides it."""

    @_accept_settings
    def __init__(
        self,
        *,
        strategy: str | Strategy = "auto",
        accelerator: str = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int = 1,
        precision: str | int | None = "32-true",
        sync_batchnorm: bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = 0,
        max_steps: int = -1,
        min_steps: int | None = 0,
        max_time: str | timedelta | Mapping[str, int] | None = None,
        max_samples: int | None = None,
        max_tokens: int | None = None,
        accumulate_grad_batches: int = 1,
        global_batch_size: int | None = None,
        accumulate_tokens: int | None = None,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] | None = "norm",
        activation_checkpointing: Literal["full", "selective"] | int | ActivationCheckpointing | None = None,
        limit_train_batches: int | float | None = 1.0,
        limit_val_batches: int | float | None = 1.0,
        limit_test_batches: int | float | None = 1.0,
        limit_predict_batches: int | float | None = 1.0,
        overfit_batches: int | float = 0.0,
        fast_dev_run: bool | int = False,
        val_check_interval: int | float | str | timedelta | Mapping[str, int] | None = 1.0,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = 2,
        log_every_n_steps: int | str | None = 50,
        logger: bool | str | Logger | Sequence[str | Logger] | None = True,
        enable_autolog_hparams: bool = True,
        callbacks: Callback | Sequence[Callback] | None = None,
        enable_progress_bar: bool | None = True,
        enable_checkpointing: bool | None = True,
        enable_model_summary: bool | None = True,
        enable_advice: bool | None = True,
        profiler: str | Profiler | None = None,
        default_root_dir: str | Path | None = None,
        deterministic: bool | Literal["warn"] | None = False,
        benchmark: bool | None = None,
        detect_anomaly: bool = False,
        check_replicas: Literal["error", "warn"] | None = "error",
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        reload_dataloaders_every_n_epochs: int = 0,
        compile: bool | Mapping[str, object] = False,
        barebones: bool = False,
    ) -> None:
        """Check the arguments, which are Lightning's with `global_batch_size`, `compile` and a few more.

        Args:
            strategy: how processes and devices share the work: a name, such as ``"ddp"`` or ``"fsdp"``, or an object
                with its own settings; ``"auto"``: the first layout that fits.
            accelerator: ``"auto"`` for what torch reports, ``"cpu"``, ``"gpu"``, or a type that torch has, such as
                ``"cuda"`` or ``"xpu"``.
            devices: devices of a node: a count, indices, -1 for all, or ``"auto"``: as many as the strategy can use.
            num_nodes: machines of the run, which all start the program.
            precision: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"``, ``"16-true"`` or ``"64-true"``.
            sync_batchnorm: replace BatchNorm layers with ``torch.nn.SyncBatchNorm``; GPUs only.
            max_epochs: -1 for no limit; 1000 if no limit is given.
            min_epochs: train at least these, whatever asks to stop.
            max_steps: in optimizer steps; -1 for no limit.
            min_steps: train at least these, whatever asks to stop.
            max_time: training time: a timedelta, its arguments, or ``"DD:HH:MM:SS"``.
            max_samples: train until this many samples, over all ranks, were seen.
            max_tokens: the same in tokens, which `TrainModule.tokens_of` counts.
            accumulate_grad_batches: micro-batches of an optimizer step; a step's gradient is the mean over their
                samples.
            global_batch_size: samples per optimizer step over all ranks; the loader's batch size is then the largest
                micro-batch.
            accumulate_tokens: instead, as many micro-batches per step as reach this many tokens over all ranks.
            gradient_clip_val: the largest norm of all gradients, or value of one; None or 0: no clipping.
            gradient_clip_algorithm: whether `gradient_clip_val` limits the ``norm`` or each ``value``.
            activation_checkpointing: recompute activations in backward: all of each repeated block (``"full"``) or of
                every n-th, or only cheap operations (``"selective"``).
            limit_train_batches: train on this many batches an epoch, or this fraction of them; 0 trains nothing.
            limit_val_batches: the same for validation; 0 switches it off.
            limit_test_batches: the same for `test`.
            limit_predict_batches: the same for `predict`.
            overfit_batches: train and validate on the same first batches, unshuffled.
            fast_dev_run: run this many batches of everything (True: 1), without loggers, checkpoints and sanity check.
            val_check_interval: an int: micro-batches between validations; a float: the fraction of an epoch; a
                duration, as for `max_time`; or ``"10_000 samples"``, ``"2.5M tokens"``, over all ranks and epochs.
            check_val_every_n_epoch: validate in every n-th epoch; None: `val_check_interval` counts across epochs.
            num_sanity_val_steps: validation batches before training; -1 for all.
            log_every_n_steps: steps between two rows for the loggers, or ``"10_000 samples"``, ``"2.5M tokens"``,
                over all ranks and epochs; 0: never.
            logger: True: a TensorBoardLogger, or a CSVLogger if tensorboard is not installed; ``"tensorboard"``,
                ``"csv"``, ``"wandb"`` or ``"mlflow"``: that one, with its defaults; a logger, or several.
            enable_autolog_hparams: send the hyperparameters to the loggers when a run begins.
            callbacks: parts that plug into the hooks of the run, beside the default ones.
            enable_progress_bar: show a progress bar.
            enable_checkpointing: save the newest state, if `callbacks` has no ModelCheckpoint.
            enable_model_summary: print the module's layers before training.
            enable_advice: say after the first steps what would shorten them most, if anything.
            profiler: ``"simple"``, ``"advanced"``, ``"pytorch"``, or a profiler.
            default_root_dir: the folder of logs and checkpoints, or a URL (``s3://bucket/runs``); None: the working
                directory.
            deterministic: use torch's deterministic algorithms; ``"warn"``: where there are any.
            benchmark: let cuDNN try its algorithms; None: as torch is set.
            detect_anomaly: have autograd name the operation that made a NaN; slow.
            check_replicas: end the run, or warn once, if parameters that ranks hold in common are not equal.
            inference_mode: evaluate under ``torch.inference_mode`` rather than ``torch.no_grad``.
            use_distributed_sampler: divide the samples of every batch among the ranks; False: the user's samplers
                already do.
            reload_dataloaders_every_n_epochs: ask for the loaders again every n epochs; 0: never.
            compile: compile the module in place: True, or a dict of arguments for ``torch.compile``.
            barebones: switch off all that costs time: loggers, checkpoints, progress bar, summary, sanity check,
                ``self.log``.

        Raises:
            ConfigError: for an unknown argument, or an invalid value or combination; the message says what to do.
        """
