"""`girih.accelerate`: runs the linear-attention layers of transformers' own models on girih's kernels."""

from girih.acceleration.accelerate import Acceleration, accelerate

__all__ = ["Acceleration", "accelerate"]
