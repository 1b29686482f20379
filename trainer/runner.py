"""Runner: carries out the requests of a Trainer, in this process or in processes that it starts."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch

from ..callbacks.callback import Callback
from ..callbacks.dispatch import Hooks, check_state_keys
from ..callbacks.helpers.loggers import local_folder, tell_loggers
from ..callbacks.model_checkpoint import ModelCheckpoint
from ..callbacks.run import Logger, Run, Stage
from ..common.console import say
from ..common.durations import parse_duration
from ..common.errors import CheckpointError, RunError
from ..common.storage import AnyPath
from ..strategies import Precision, is_auto, place
from ..strategies.launch.node_folder import NodeFolder
from . import planning
from .advice import add_advice, show_batch
from .checkpoint import make_writer
from .checkpoint.manifest import Origin
from .checks import (
    check_callbacks_of_fit,
    check_loggers,
    check_manual,
    check_module,
    check_stages,
    check_sync_batchnorm,
)
from .data.loader_kinds import ending_workers
from .data.seed import capture_rng, restore_rng
from .default_callbacks import add_supervisors, with_omission
from .folders import settle_folders
from .loggers import BY_NAME, LoggersByName
from .loggers.base import continue_loggers
from .metrics.metrics import Metrics
from .module.hooks import ModuleHooks
from .request import Request
from .result import EndedRun, Result, result_of, take_over
from .resume.after_restart import go_on, note_end, note_run
from .resume.find_checkpoint import find_checkpoint
from .resume.hold_folder import hold_and_choose, names_a_link, open_loggers
from .resume.save import newest_saved, point_to_checkpoint
from .resume.take_snapshot import end_snapshots
from .session.detailed_profilers import profiler_by_name
from .session.interruption import Interruption
from .session.session import Session
from .session.settings import Settings
from .session.torch_flags import set_torch_flags
from .session.train_state import TrainState
from .setup import make_callbacks, make_loggers, set_up, with_module_callbacks

Work = Callable[[Session, Request], object]


class Runner:
    """Holds the parts of a Trainer that its runs share, and begins and ends each run in order.

    Args:
        settings: the trainer's settings.
        run: the trainer, as hooks see it.
        by_name: what makes a logger that is given by its name.
    """

    def __init__(self, settings: Settings, run: Run, by_name: LoggersByName = BY_NAME) -> None:
        self.settings, self._run, self._by_name = settings, run, by_name
        self.given = settings
        """The settings before ``strategy="auto"`` was chosen."""
        self.precision = Precision(settings.precision)
        where = settings.strategy, settings.accelerator, settings.devices, settings.num_nodes
        self.strategy, self.hardware = place(*where)
        self.strategy.validate(self.hardware, self.precision)
        check_sync_batchnorm(settings, self.hardware)
        self.root = local_folder(settings.default_root_dir or ".")
        """The local folder of what has no other; absolute once a run has started."""
        self.loggers = make_loggers(settings, self.root, by_name)
        check_loggers(self.loggers)
        self._callbacks = make_callbacks(settings)
        self.profiler = profiler_by_name(settings.profiler)
        self.state = TrainState()
        # all fits of a trainer have one lineage: the next one continues with what callbacks have kept
        self.origin = Origin(secrets.token_hex(16))
        self.current: Session | EndedRun | None = None
        """The current or last run."""
        self.is_running = self.has_finished = self._has_fitted = self._has_described = False
        self._reports = False
        """Whether this is a copy in another process, whose caller waits for a `Result`."""
        self._result: Result | None = None
        self.asked_for: Any = None  # the module of the newest call, which may fail in processes of its own

    @property
    def session(self) -> Session:
        """The current or last run in this process.

        Raises:
            RunError: before the first run, and after a run in other processes, which have ended.
        """
        if self.current is None:
            raise RunError("trainer.session must be a run, found None; call fit, validate, test or predict first.")
        if isinstance(self.current, EndedRun):
            raise RunError(
                f"The processes of this {self.current.task} have ended, and with them its optimizers and loaders; "
                f"call this in a hook, while trainer.{self.current.task} runs."
            )
        return self.current

    @property
    def stage(self) -> Stage | None:
        """What is running; None before and after."""
        return self.current.progress.stage if self.is_running and self.current is not None else None

    def set_loggers(self, loggers: list[Logger]) -> None:
        """Replace the loggers, between runs.

        Raises:
            RunError: during a run.
            ConfigError: if two of them write to the same folder.
        """
        if self.is_running:
            raise RunError(f"trainer.loggers was set while {self.stage} runs; set it before or after the run.")
        check_loggers(loggers)
        self.loggers = loggers

    @property
    def callbacks(self) -> list[Callback]:
        """The trainer's callbacks and, after the first run, those of its module."""
        return list(self.current.callbacks) if self.current is not None else self._callbacks

    def execute(self, work: Work, request: Request) -> Any:
        """Do the work in this process, or in processes of its own."""
        with self._guarded(request) as checked:
            self.asked_for = checked.module
            if self.strategy.launcher.starts_processes:
                return self._launch(work, checked)
            with self._connected(checked) as session, set_torch_flags(self.settings):
                return work(session, checked)

    @contextmanager
    def _guarded(self, request: Request) -> Iterator[Request]:
        """Check a request in the caller's process before anything starts, and allow one run at a time."""
        if self.is_running:
            running = self.current.task if self.current is not None else "another call"
            raise RunError(
                f"Trainer.{request.task} was called while {running} runs; call it when that has returned, "
                "or use another Trainer."
            )
        check_module(request.module, request.datamodule, request.task)
        check_stages(request.train_loaders)
        check_manual(request.module, self.settings)
        self._choose_strategy(request)
        micro_batches = request.micro_batches(self._callbacks, self.settings)
        self.strategy.validate_module(request.module, trains=request.task == "fit", micro_batches=micro_batches)
        if request.task == "fit":
            check_callbacks_of_fit(self._callbacks, request, self.settings, self.strategy, self.hardware)
        is_external = self.hardware.environment.is_external  # the ranks look at the disk once they are connected
        if not is_external:
            self._settle_folders(request)
        checkpoint = None if is_external else self._find_checkpoint(request)
        self.is_running, self.has_finished = True, False
        try:
            yield replace(request, checkpoint=checkpoint)
            self.has_finished = True
        finally:
            self.is_running = False

    def _choose_strategy(self, request: Request) -> None:
        """Choose, for ``strategy="auto"``, a layout with which the module fits on the devices of this machine.

        With one device there is nothing to choose; several nodes, or ranks of a launcher, would have to choose before
        they can agree.
        """
        environment = self.hardware.environment
        is_here = not environment.is_external and environment.num_nodes == 1 < environment.world_size
        if not (is_here and is_auto(self.given.strategy) and request.task == "fit"):
            return
        trainer: Any = type(self._run)
        data = request.train_loaders, request.datamodule
        choice = planning.choose_layout(trainer, self.given, self.hardware, request.module, *data)
        if choice is None:
            return
        self.settings, self.strategy = choice.applied_to(self.given), choice.layout.make()
        self.strategy.validate(self.hardware, self.precision)
        say(choice.reason)

    def _settle_folders(self, request: Request) -> None:
        writes = request.task == "fit" and (self.settings.logger is True or self.settings.enable_checkpointing)
        self.root = settle_folders(self.root, self._callbacks, self.loggers, writes=writes, saves=request.task == "fit")

    def _find_checkpoint(self, request: Request) -> AnyPath | None:
        savers = [callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)]
        how = {"to_resume": request.task == "fit", "takes_parts": self.hardware.environment.num_nodes > 1}
        return find_checkpoint(request.ckpt_path, self.loggers, savers, self.root, **how, has_fitted=self._has_fitted)

    # --- in processes of its own -------------------------------------------------------------------------------------

    def _launch(self, work: Work, request: Request) -> object:
        """Do the work in processes of its own, and take over their result."""

        def take(answer: tuple[Result, object]) -> None:
            self._has_described = True
            self.precision.convert_module(request.module)
            callbacks = self._callbacks_of(request)
            self._begin(request)
            self.state, self.origin = answer[0].state, answer[0].origin
            ended = self.current = EndedRun(
                task=request.task,
                module=request.module,
                datamodule=request.datamodule,
                callbacks=callbacks,
                hooks=Hooks(self._run, request.module, ModuleHooks, callbacks),
                metrics=self._metrics_of(request),
                state=self.state,
                resumed_from=answer[0].resumed_from,
                origin=self.origin,
            )
            take_over(ended, answer[0], self.loggers)

        parts = {**request.parts(), "callbacks": self._callbacks, "loggers": self.loggers, "strategy": self.strategy}
        before = self.current
        with NodeFolder.create(Path(gettempdir())) as folder:  # the next run removes it if this process is killed
            saved_list = folder.path / "saved"
            job = partial(self._report, work, replace(request, saved_list=saved_list), capture_rng())
            try:
                return self.strategy.launcher.launch(job, on_result=take, parts=parts)[1]
            except BaseException as error:
                ended, is_stopped = self.current, isinstance(error, KeyboardInterrupt | SystemExit)
                if is_stopped and isinstance(ended, EndedRun) and ended is not before:
                    if isinstance(error, KeyboardInterrupt):
                        ended.interruption.signal = signal.SIGINT  # the workers got SIGTERM
                    ended.interruption.raise_if_requested(ended.saves.last)
                point_to_checkpoint(error, newest_saved(saved_list))
                self.strategy.annotate(error)
                from ..strategies.launch.launcher import without_launch

                without_launch(error)
                raise

    def _report(self, work: Work, request: Request, rng: Mapping[str, object]) -> tuple[Result, object]:
        """Do the work in a process of the run, with the caller's random state, and return its result."""
        restore_rng(rng)
        self._reports = True
        with self._connected(request) as session, set_torch_flags(self.settings):
            value = work(session, request)
        assert self._result is not None
        return self._result, value

    def __getstate__(self) -> dict[str, object]:
        """Leave out the last run: a trainer that is sent to another process begins a new one there."""
        return {**self.__dict__, "current": None, "_result": None, "asked_for": None}

    # --- in this process ---------------------------------------------------------------------------------------------

    @contextmanager
    def _connected(self, request: Request) -> Iterator[Session]:
        """Open the session of a run in this process, and end it in order, also after an error."""
        self.strategy.connect(self.hardware, self.precision)
        session = self.current = self._open_session(request)
        status = "failed"
        failure: BaseException | None = None
        try:
            self._agree(session, request)
            set_up(session)
            rank = self.strategy.rank if self.strategy.world_size > 1 else None
            with ending_workers(), self.profiler.running(request.task, rank, self._run.log_dir):
                yield session
            status = "interrupted" if session.interruption.is_requested else "success"
            note_end(session)
            if self._reports:
                self._result = result_of(session)
        except BaseException as error:
            from ..strategies.launch.peer_failures import blame_peer

            self.strategy.annotate(error)
            add_advice(error)
            planning.comment_on_memory(session, error)
            progress = session.progress
            if progress.is_in_step and progress.micro_batch is not None and progress.stage == "train":
                where = f"micro-batch {progress.batch_idx} of epoch {session.state.epoch}"
                show_batch(error, progress.micro_batch.batch, where)
            failure, session.has_failed = error, True
            session.hooks.call("on_exception", error)
            if session.datamodule is not None:
                session.datamodule.on_exception(error)
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else status
            culprit = None if self._reports else blame_peer(self.strategy.ranks.group, error)  # or the caller does
            if culprit is not None:
                self.strategy.annotate(culprit)
                failure = culprit
                raise culprit from error
            raise
        finally:
            self._close(session, status)
            last = session.saves.last
            if failure is not None and not self._reports and last is not None and last != session.resumed_from:
                point_to_checkpoint(failure, last)

    def _agree(self, session: Session, request: Request) -> None:
        """Make all ranks use rank 0's seed, checkpoint and folders."""
        strategy, environment, session.resumed_from = self.strategy, self.hardware.environment, request.checkpoint
        if environment.is_external:  # nobody has looked at the disk yet, even with one process
            with strategy.ranks.all.fail_together():
                self._settle_folders(request)
            session.resumed_from = strategy.ranks.all.on_first_rank(partial(self._find_checkpoint, request))
        if strategy.world_size > 1:
            if strategy.rank == 0 and not (self._has_described or strategy.ranks.all.is_fake):
                say(self.hardware.describe(strategy.ranks.environment))
            self._has_described = True
            session.state.seed = strategy.ranks.all.broadcast(session.state.seed)
        is_link = names_a_link(session, request.ckpt_path)
        session.named_checkpoint = None if is_link else session.resumed_from
        if strategy.rank:
            tell_loggers(self.loggers, "silence")
        if request.task == "fit":
            session.resumed_from = go_on(session) or session.resumed_from
        session.resumed_from = hold_and_choose(session, request.ckpt_path, is_link=is_link)
        if request.task == "fit":
            versions = strategy.ranks.all.on_first_rank(partial(open_loggers, session))
            note_run(session, versions)
            if strategy.rank:
                continue_loggers(self.loggers, versions)

    def _begin(self, request: Request) -> None:
        """Begin the counters of a fit, and its folder."""
        if request.task == "fit":
            self.state = TrainState(seed=torch.initial_seed())
            if self.settings.logger is True and self._has_fitted:
                self.loggers = make_loggers(self.settings, self.root, self._by_name)  # another run, another folder
            self._has_fitted = True

    def _callbacks_of(self, request: Request) -> list[Callback]:
        callbacks = with_omission(with_module_callbacks(self._callbacks, request.module))
        callbacks = add_supervisors(self.strategy, callbacks, logs=bool(self.loggers))
        check_state_keys(callbacks)
        return callbacks

    def _metrics_of(self, request: Request) -> Metrics:
        """Return the metrics that ``self.log`` writes to in a run, attached to the module."""
        metrics = Metrics(self.strategy, request.module)
        metrics.position, metrics.guard.epoch = self.state.global_step, self.state.current_epoch
        request.module.attach(self._run, None if self.settings.barebones else metrics)
        if request.datamodule is not None:
            request.datamodule.trainer = self._run
        return metrics

    def _open_session(self, request: Request) -> Session:
        callbacks = self._callbacks_of(request)
        self._begin(request)
        return Session(
            task=request.task,
            run=self._run,
            settings=self.settings,
            writer=make_writer(self.strategy.ranks.group, is_async=request.task == "fit"),
            strategy=self.strategy,
            module=request.module,
            datamodule=request.datamodule,
            callbacks=callbacks,
            loggers=self.loggers,
            profiler=self.profiler,
            hooks=Hooks(self._run, request.module, ModuleHooks, callbacks),
            metrics=self._metrics_of(request),
            state=self.state,
            origin=self.origin,
            saved_list=request.saved_list,
            interruption=Interruption(
                parse_duration("max_time", self.settings.max_time), is_alone=self.strategy.world_size == 1
            ),
        )

    def _close(self, session: Session, status: str) -> None:
        session.progress.stage = None
        self.origin = session.origin
        if status == "failed":
            session.writer.abandon()
        end_snapshots(session, has_failed=status == "failed")
        with suppress(CheckpointError):  # after an error, that error is raised, and the writer logs its own
            session.writer.close()
        if session.train_data is not None:
            session.train_data.close()
        try:
            session.hooks.call("teardown", session.task)
            if session.datamodule is not None:
                session.datamodule.teardown(session.task)
            if self.strategy.rank == 0:
                tell_loggers(self.loggers, "finalize", status)
        except BaseException as error:
            self.strategy.annotate(error)
            raise
        finally:
            session.held.close()
            self.strategy.close()
