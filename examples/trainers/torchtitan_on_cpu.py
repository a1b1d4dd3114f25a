# ruff: noqa: E402  # torchtitan asks for the device when it is imported
"""torchtitan without a GPU: import it before torchtitan. On a GPU nothing of this is needed.

Debug models can then be tried on ranks over gloo, with `spmd_backend="partial_dtensor"` and without
CUDA graphs, see `on_cpu`.
"""

import torch
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components import metrics
from torchtitan.distributed import utils
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.trainer import Trainer

utils.set_pg_timeouts = lambda timeout, parallel_dims: None  # gloo's cannot be changed


class Memory:
    """What torchtitan asks about the memory of a device: nothing is known of a CPU's."""

    device_name = "cpu"
    device_capacity_gib = 0.0

    def get_peak_stats(self):
        """Zeros."""
        return metrics.DeviceMemStats(*[0.0] * 4, 0, 0)

    def reset_peak_stats(self):
        """Nothing to reset."""


metrics.build_device_memory_monitor = Memory
divide = FSDPModule.set_gradient_divide_factor


def divide_by_sum(self, factor):
    """Gloo sums, and cannot scale while it does."""
    divide(self, factor)
    self.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = divide_by_sum


def on_cpu(config: Trainer.Config) -> Trainer.Config:
    """The configuration with what runs on a CPU: DTensors, plain attention, no CUDA graphs."""
    config.parallelism.spmd_backend = "partial_dtensor"
    config.training.disable_cuda_graphs = True
    for _, _, parent, name in list(config.model_spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    return config
