"""Strategies: training one module on some number of processes. Imports common only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_names import lazy_names

if TYPE_CHECKING:
    from .cluster.hardware import Hardware as Hardware
    from .data_parallel import DataParallelStrategy as DataParallelStrategy
    from .ddp import DDPStrategy as DDPStrategy
    from .device_map import DeviceMapStrategy as DeviceMapStrategy
    from .elastic import ElasticStrategy as ElasticStrategy
    from .fsdp import FSDPStrategy as FSDPStrategy
    from .local_sgd import LocalSGDStrategy as LocalSGDStrategy
    from .model_parallel import ParallelStrategy as ParallelStrategy
    from .module.activation_checkpointing import ActivationCheckpointing as ActivationCheckpointing
    from .module.precision import Precision as Precision
    from .parallel.ddp_options import DDPOptions as DDPOptions
    from .parameter_server import ParameterServerStrategy as ParameterServerStrategy
    from .placed.placed import Placed as Placed
    from .placement import check_strategy as check_strategy
    from .placement import is_auto as is_auto
    from .placement import place as place
    from .resilience.faults import Chaos as Chaos
    from .servers.remote_embedding import RemoteEmbedding as RemoteEmbedding
    from .single import SingleDeviceStrategy as SingleDeviceStrategy
    from .strategy import Strategy as Strategy
    from .zero import ZeroStrategy as ZeroStrategy
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "cluster.hardware": ("Hardware",),
            "data_parallel": ("DataParallelStrategy",),
            "ddp": ("DDPStrategy",),
            "device_map": ("DeviceMapStrategy",),
            "elastic": ("ElasticStrategy",),
            "fsdp": ("FSDPStrategy",),
            "local_sgd": ("LocalSGDStrategy",),
            "model_parallel": ("ParallelStrategy",),
            "module.activation_checkpointing": ("ActivationCheckpointing",),
            "module.precision": ("Precision",),
            "parallel.replica": ("DDPOptions",),
            "parameter_server": ("ParameterServerStrategy",),
            "placed.placed": ("Placed",),
            "placement": ("check_strategy", "is_auto", "place"),
            "resilience.faults": ("Chaos",),
            "servers.remote_embedding": ("RemoteEmbedding",),
            "single": ("SingleDeviceStrategy",),
            "strategy": ("Strategy",),
            "zero": ("ZeroStrategy",),
        },
    )
