"""Estimates of parameter servers compared with real steps: what trainers and servers hold, and exchange."""

from dataclasses import replace

import pytest
import torch
from as_rank import calm_down
from planned_modules import GPT, MeasuredStep, hardware_of, loader, profile_of, settings_of
from sweep import IS_SWEEP
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ConfigError, ParameterServerStrategy, RemoteEmbedding, Trainer, TrainModule
from echelon.strategies.distributed.nested import iterate_tensors
from echelon.strategies.estimate.by_strategy import estimate_servers, estimate_step
from echelon.strategies.estimate.live_memory import storages_bytes
from echelon.strategies.servers import tensorpipe
from echelon.testing import run_ranks
from echelon.trainer.planning.profiling import ProfilingStrategy, take_profile

NUM_IDS, BATCH = 4000, 8


class Words(TrainModule):
    """Two tables, each of whose rows a step uses at most once, and layers that are not served."""

    def __init__(self, sparse):
        super().__init__()
        self.first, self.second = (RemoteEmbedding(NUM_IDS, size, sparse=sparse) for size in (32, 16))
        self.body = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 8))

    def training_step(self, batch, batch_idx):
        [ids] = batch
        return self.body(torch.cat([self.first(ids), self.second(ids)], -1)).square().mean()

    def configure_optimizers(self):
        if self.first.sparse:
            return torch.optim.Adagrad(self.parameters(), lr=0.1)
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def words_loader():
    ids = torch.randperm(NUM_IDS, generator=torch.Generator().manual_seed(0))[: 96 * BATCH]
    return DataLoader(TensorDataset(ids.view(-1, 8)), BATCH)


CASES = {
    "two servers": (GPT, {"servers": 2}, 1),
    "async": (GPT, {"mode": "async", "max_staleness": 2}, 1),
    "sparse tables": (lambda: Words(sparse=True), {"dense": "ddp"}, 1),
    "tables of micro-batches": (lambda: Words(sparse=False), {"dense": "ddp"}, 2),
}
if IS_SWEEP:
    CASES |= {
        "sync": (GPT, {}, 1),
        "tables": (lambda: Words(sparse=False), {"dense": "ddp", "servers": 2}, 1),
    }


def held_by_server():
    """Return what this server holds; called in its process."""
    service = tensorpipe._SERVICES[0]
    held = list(service._optimizers.values())
    return {
        "parameters": storages_bytes([p for one in held for p in one.parameters.values()]),
        "gradients": storages_bytes([g for one in held for g in (*one._gradients, *one._views.values())]),
        "optimizer": storages_bytes(iterate_tensors([s for one in held for s in one.optimizer.state.values()])),
    }


class MeasuredTrainer(MeasuredStep):
    """Measures the second step of this trainer, and the servers after it."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 1 and not hasattr(self, "before"):
            self.before = trainer.strategy.traffic
        super().on_train_batch_start(trainer, module, batch, batch_idx)

    def on_train_step_end(self, trainer, module):
        strategy = trainer.strategy
        moved = strategy.traffic - getattr(self, "before", 0)
        super().on_train_step_end(trainer, module)
        if trainer.global_step == 2:
            number = strategy.choices.servers
            self.measured["servers"] = [strategy.rpc_sync(f"server{i}", held_by_server) for i in range(number)]
            self.measured["served"] = moved
            kept = [value for served in strategy.placed.served.values() for value in served._agreed]
            self.measured["communication"] = storages_bytes(kept)


def measured_on_ranks():
    calm_down()
    found = {}
    for name, (make, choices, accumulate) in CASES.items():
        torch.manual_seed(0)
        measured = MeasuredTrainer()
        settings = settings_of(max_steps=3, callbacks=[measured], accumulate_grad_batches=accumulate)
        trainer = Trainer(strategy=ParameterServerStrategy(**choices), **settings)
        trainer.fit(make(), loader(GPT) if make is GPT else words_loader())
        found[name] = measured.measured
    return found


def profile_of_case(make):
    if make is GPT:
        return profile_of(GPT)
    module = make()

    def fit(strategy, callback):
        settings = settings_of(strategy=strategy, devices=1, max_steps=3, callbacks=[callback])
        Trainer(**settings).fit(module, words_loader())

    # without values, a sparse tensor has no shape
    return take_profile(fit, module, ProfilingStrategy(measures=module.first.sparse))


@pytest.mark.sweep
def test_what_trainers_and_servers_hold_and_exchange_is_what_was_estimated():
    ranks = run_ranks(measured_on_ranks, 2)
    for name, (make, choices, accumulate) in CASES.items():
        profile, hardware = profile_of_case(make), hardware_of(2)
        profile = replace(profile, num_micro_batches=accumulate)
        strategy = ParameterServerStrategy(**choices)
        estimate, servers = estimate_step(strategy, profile, hardware), estimate_servers(strategy, profile, hardware)
        for index, rank in enumerate(ranks):
            measured = rank[name]
            for kind in ("parameters", "gradients", "optimizer"):
                assert measured[kind] == pytest.approx(getattr(estimate, kind), rel=0.02, abs=64), (name, kind)
            assert measured["activations"] == pytest.approx(estimate.activations, rel=0.15), name
            kept = estimate.communication if index == 0 else 0.0
            assert measured["communication"] == pytest.approx(kept, rel=0.02), name
            assert measured["served"] == pytest.approx(estimate.traffic["servers"], rel=0.05), name
            assert measured["traffic"] == pytest.approx(estimate.traffic.get("dp_replicate", 0), rel=0.05, abs=64), name
        for index, server in enumerate(servers):
            for kind in ("parameters", "gradients", "optimizer"):
                measured = ranks[0][name]["servers"][index][kind]
                assert measured == pytest.approx(getattr(server, kind), rel=0.02, abs=64), (name, index, kind)
        assert sum(s.traffic["servers"] for s in servers) == pytest.approx(2 * estimate.traffic["servers"])
        assert estimate.host == sum(server.total for server in servers)


def test_servers_without_a_tensor_have_no_estimate():
    with pytest.raises(ConfigError, match="at most the number of tables of RemoteEmbedding, got 1 for 0"):
        estimate_step(ParameterServerStrategy(dense="ddp"), profile_of(GPT), hardware_of(2))
