"""A fit with parameter servers on several nodes; rank 0 prints its weights and all listening sockets, in JSON.

Usage: server_nodes.py SERVERS, a number or "nodes".
"""

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "helpers"))

import torch
from small import Regression, loader, quiet
from socket_program import addresses_of, open_sockets

from echelon import Callback, ParameterServerStrategy, seed_everything


def listening():
    """Return the addresses at which this process accepts anything."""
    return sorted(addresses_of(os.getpid(), open_sockets()))


def weights_of(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


class Looks(Callback):
    def on_train_end(self, trainer, module):
        strategy = trainer.strategy
        if strategy.rank == 0:
            servers = [peer for peer in strategy._connection.peers.names if peer.startswith("server")]
            found = {peer: strategy.rpc_sync(peer, listening) for peer in ("trainer1", *servers)}
            found["trainer0"] = listening()
            os.write(1, f"{json.dumps({'weights': weights_of(module), 'listening': found})}\n".encode())
        strategy.barrier()


def fit(strategy, batch_size, *callbacks):
    """Train, and return the weights."""
    seed_everything(3, verbose=False)
    module = Regression()
    trainer = quiet(strategy=strategy, precision="64-true", max_epochs=2, callbacks=list(callbacks))
    trainer.fit(module, loader(16, batch_size))
    return weights_of(module)


if __name__ == "__main__":
    torch.set_num_threads(1)
    [servers] = sys.argv[1:]
    fit(ParameterServerStrategy(int(servers) if servers.isdigit() else servers), 2, Looks())
