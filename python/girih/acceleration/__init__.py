"""The linear layers of transformers' own models on girih's kernels: `girih.accelerate`."""

from girih.acceleration.accelerate import Acceleration, accelerate

__all__ = ["Acceleration", "accelerate"]
