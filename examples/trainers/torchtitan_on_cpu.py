# ruff: noqa: E402  # torchtitan asks for the device when it is imported
"""torchtitan without a GPU: import it before torchtitan. On a GPU nothing of this is needed.

Debug models can then be tried on ranks over gloo, with what `torchtitan_debug.plain` chooses.
"""

import torch
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components import metrics
from torchtitan.distributed import utils

utils.set_pg_timeouts = lambda timeout, parallel_dims: None  # gloo's cannot be changed


class Memory:
    """Empty statistics of memory, which torchtitan reads for every device."""

    device_name = "cpu"
    device_capacity_gib = 0.0

    def get_peak_stats(self):
        """Return zeros."""
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
