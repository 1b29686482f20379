"""WatchedStep: a callback that measures the memory and the traffic of a step in stages."""

from echelon import Callback
from echelon.strategies.distributed.nested import iterate_tensors
from echelon.strategies.estimate.counted_traffic import CountedTraffic
from echelon.strategies.estimate.live_memory import LiveMemory, storages_bytes
from echelon.trainer.planning.rehearsed_rank import held_parameters


class WatchedStep(Callback):
    """Measures the second step of this rank."""

    def on_train_epoch_start(self, trainer, module):
        self.is_watching = False

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 1 and not self.is_watching:
            self.is_watching, self.memory, self.traffic = True, LiveMemory(module), CountedTraffic()
            self.resizes = self.memory.watching_resizes()
            for mode in (self.resizes, self.memory, self.traffic):
                mode.__enter__()

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == 2:
            for mode in (self.traffic, self.memory, self.resizes):
                mode.__exit__(None, None, None)
            own = list(held_parameters(module.parameters()))
            state = storages_bytes(iterate_tensors([values for o in trainer.optimizers for values in o.state.values()]))
            self.measured = {
                "parameters": storages_bytes(own),
                "gradients": storages_bytes(p.grad for p in own),
                "optimizer": state,
                "total": storages_bytes(own) + state + self.memory.most,
                "traffic": self.traffic.sent.total(),
            }
            trainer.should_stop = True
