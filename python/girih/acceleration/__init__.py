"""`girih.accelerate`: runs the linear-attention layers of transformers' own models on girih's kernels."""

from girih.acceleration.accelerate import Acceleration, accelerate
from girih.acceleration.kernel_config import kernel_config

__all__ = ["Acceleration", "accelerate", "kernel_config"]
