"""RemoteTables: the tables of a module's `RemoteEmbedding` layers while servers hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...common.errors import ConfigError
from ..distributed.collectives import Collectives
from ..module.memory_estimate import MemoryShare
from .connection import Connection
from .flat_layout import deal_names
from .remote_embedding import RemoteEmbedding


class RemoteTables:
    """The tables of a module's `RemoteEmbedding` layers.

    Raises:
        ConfigError: for a table that another layer also uses, or that is renormalized as it is read.
    """

    def __init__(self, module: nn.Module) -> None:
        # a layer may have several names, and the state of the module has its table under each
        parts = module.named_modules(remove_duplicate=False)
        found = {name: part for name, part in parts if isinstance(part, RemoteEmbedding)}
        self._layers: dict[str, list[tuple[str, RemoteEmbedding]]] = {}
        by_weight: dict[int, str] = {}
        for name, layer in found.items():
            key = by_weight.setdefault(id(layer.weight), f"{name}.weight" if name else "weight")
            self._layers.setdefault(key, []).append((name, layer))
        self.names = frozenset(self._layers)
        self.sparse = {key: all(layer.sparse for _, layer in layers) for key, layers in self._layers.items()}
        self._holders: Mapping[str, int] = {}
        _check_tables(module, found)

    @property
    def all_names(self) -> frozenset[str]:
        """`names`, and the other names of the same tables."""
        return frozenset(self._aliases())

    @property
    def _weights(self) -> dict[str, Tensor]:
        return {name: layers[0][1].weight for name, layers in self._layers.items()}

    @property
    def memory_share(self) -> MemoryShare:
        """The share of a trainer: everything but the tables."""
        tables = set(self._weights.values())

        def share(parameter: Tensor) -> float:
            return float(parameter not in tables)

        return MemoryShare(share, share, share)

    # --- while a fit goes on -----------------------------------------------------------------------------------------

    def leave(self, connection: Connection, holders: Mapping[str, int]) -> None:
        """Send the tables of trainer 0 to the servers. Collective: every trainer calls it."""
        self._holders = holders
        self._send(self._weights, connection)
        for key, layers in self._layers.items():
            for _, layer in layers:
                layer.look()  # before the first of them lets the table go
            for name, layer in layers:
                if not layer.is_remote:  # under its first name
                    layer.go_remote(f"RemoteEmbedding {name!r}", partial(self._pull, connection, key))
                if connection.rank != 0:  # whose tables are trained
                    layer.found()
        connection.meet()

    def _send(self, tables: Mapping[str, Tensor], connection: Connection) -> None:
        if connection.rank == 0:
            messages: dict[int, dict[str, Tensor]] = {}
            for name, table in tables.items():
                messages.setdefault(self._holders[name], {})[name] = table.detach().cpu().contiguous()
            connection.ask("hold", {index: (message,) for index, message in messages.items()})

    def _pull(self, connection: Connection, name: str, ids: Tensor) -> Tensor:
        wire = ids.cpu().int() if self._weights[name].shape[0] < 2**31 else ids.cpu()
        index = self._holders[name]
        rows: Tensor = connection.ask("rows", {index: (name, wire)})[index]
        return rows

    def fetch(self, connection: Connection, names: Sequence[str]) -> dict[str, Tensor]:
        """Return whole tables from their servers."""
        return {name: next(iter(connection.ask("table", {self._holders[name]: (name,)}).values())) for name in names}

    def fetch_all(self, connection: Connection) -> dict[str, Tensor]:
        """Return all tables from their servers, under each of their names in the state of the module."""
        tables = self.fetch(connection, list(self.names))
        return {name: tables[key] for name, key in self._aliases().items()}

    def come_home(self, connection: Connection, *, has_failed: bool) -> None:
        """Put the tables back into the module; of a run that has failed only if the servers still answer."""
        for name, layers in self._layers.items():
            if layers[0][1].is_remote:
                table = connection.try_ask("table", self._holders[name], name) if has_failed else None
                if table is None and not has_failed:
                    table = self.fetch(connection, [name])[name]
                for _, layer in layers:
                    layer.come_home(table)

    # --- state -------------------------------------------------------------------------------------------------------

    def own_share(
        self, state: Mapping[str, object], connection: Connection, collectives: Collectives
    ) -> dict[str, object]:
        """Return the share of the module's state that this trainer saves: some tables; on the first, also all else."""
        sizes = {name: weight.numel() for name, weight in self._weights.items()}
        own = self.fetch(connection, deal_names(sizes, collectives.world_size)[connection.rank])
        aliases = self._aliases()
        share = {n: v for n, v in state.items() if n not in aliases} if connection.rank == 0 else {}
        return share | {name: own[key] for name, key in aliases.items() if key in own}

    def load(self, state: Mapping[str, Any], connection: Connection, collectives: Collectives) -> None:
        """Send the tables of a state to the servers. Collective: every trainer calls it."""
        aliases = self._aliases()
        found = {aliases[name]: table for name, table in state.items() if name in aliases}
        self._send({name: table.to(self._weights[name].dtype) for name, table in found.items()}, connection)
        for name in found:
            for _, layer in self._layers[name]:
                layer.found()
        collectives.barrier()

    def without_memory(self, state: Mapping[str, object]) -> dict[str, object]:
        """Return a state with placeholders in place of tables."""
        weights, aliases = self._weights, self._aliases()
        return {name: weights[aliases[name]].detach() if name in aliases else value for name, value in state.items()}

    def _aliases(self) -> dict[str, str]:
        """Return, for each name of a table in a state, the name under which it is held."""
        return {
            f"{name}.weight" if name else "weight": key for key, layers in self._layers.items() for name, _ in layers
        }


def _check_tables(module: nn.Module, found: Mapping[str, RemoteEmbedding]) -> None:
    tables = {id(layer.weight) for layer in found.values()}
    for name, part in module.named_modules():
        shared = [own for own, p in part.named_parameters(recurse=False) if id(p) in tables]
        if shared and not isinstance(part, RemoteEmbedding):
            raise ConfigError(
                f"A RemoteEmbedding must not share its table with dense='ddp', got {name}.{shared[0]}, which is tied "
                "to it; leave out dense='ddp', or untie them."
            )
    for name, layer in found.items():
        if layer.max_norm is not None or layer.scale_grad_by_freq:
            raise ConfigError(
                f"RemoteEmbedding {name!r} must have neither max_norm nor scale_grad_by_freq with dense='ddp', got "
                f"{layer.max_norm} and {layer.scale_grad_by_freq}; leave both out."
            )
