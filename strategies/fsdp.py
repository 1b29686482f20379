"""FSDPStrategy: each process keeps a shard of the module and gathers one unit at a time during a step."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from torch import nn

from .distributed.process_group import ProcessSettings
from .parallel.mesh import Degrees, Replicas
from .parallel.sharding_policy import Policy, Reshard, ShardingOptions, ShardingPlan
from .sharded import ShardedStrategy


class FSDPStrategy(ShardedStrategy):
    """Train with torch's ``fully_shard`` (FSDP2): parameters, gradients and optimizer state are sharded over processes.

    The parameters of a unit (a submodule) are gathered before its forward and its backward, and freed afterwards.
    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023, and Rajbhandari et
    al., "ZeRO", 2020.

    Args:
        replicate: the number of replicas; more than one is HSDP, which gathers only within a replica. ``"nodes"`` makes
            one replica per node, or two on a single node.
        policy: which submodules are units, see `sharding_policy.find_units`; by default the repeated blocks. A module
            that shards its submodules in ``configure_sharding`` does not need one.
        reshard_after_forward: free parameters after forward and gather them again for backward (ZeRO-3); False keeps
            them (ZeRO-2); a number keeps them sharded among that many ranks.
        forward_prefetch: how many units ahead parameters are gathered in forward; 0 leaves it to torch.
        backward_prefetch: the same in backward, where torch gathers one unit ahead.
        sync_each_micro_batch: with several micro-batches per step, reduce gradients after each one, which takes more
            communication and less memory; otherwise each rank keeps whole gradients until the last micro-batch.
        cpu_offload: keep parameters, gradients and optimizer state on the CPU, and compute the update there.
        deferred_init: let ``configure_model`` build without allocating memory, then fill the shards tensor by tensor
            with the values that one process would have: for a module larger than one process's memory.
        mixed_precision: torch's ``MixedPrecisionPolicy``, used instead of the one for the trainer's precision; its
            ``output_dtype`` applies to the outputs of steps.
        find_unused_parameters: for a module of which ranks use different parameters in some steps, if the first steps
            do not show that: ranks agree on each unit before they gather it, in all steps.
        settings: see `ProcessSettings`.

    Example::

        Trainer(strategy="fsdp", devices=2, precision="bf16-mixed")
        Trainer(strategy=FSDPStrategy(replicate=2, deferred_init=True), devices=4)
    """

    name: ClassVar[str] = "fsdp"

    def __init__(
        self,
        *,
        replicate: Replicas = 1,
        policy: Policy | None = None,
        reshard_after_forward: Reshard = True,
        forward_prefetch: int = 0,
        backward_prefetch: int = 0,
        sync_each_micro_batch: bool = False,
        cpu_offload: bool = False,
        deferred_init: bool = False,
        mixed_precision: Any = None,
        find_unused_parameters: bool = False,
        **settings: Unpack[ProcessSettings],
    ) -> None:
        options = ShardingOptions(
            policy=policy,
            reshard_after_forward=reshard_after_forward,
            forward_prefetch=forward_prefetch,
            backward_prefetch=backward_prefetch,
            sync_each_micro_batch=sync_each_micro_batch,
            cpu_offload=cpu_offload,
            mixed_precision=mixed_precision,
            find_unused_parameters=find_unused_parameters,
        )
        super().__init__(options, deferred_init=deferred_init, **settings)
        self.replicate = replicate

    def _find_degrees(self) -> Degrees:
        return Degrees.of(self.ranks.environment.world_size, self.ranks.environment.num_nodes, self.replicate)

    def plan(self, module: nn.Module) -> ShardingPlan:
        """Return the units that the module would be sharded into; print it for a table. The module is not changed."""
        return self.options.plan(module, self.precision, self.degrees)
