"""Sampling: from a target row to a token, the same with and without speculation."""

from power_core.sampling.draws import reduce_seed, resolve_seed, uniform
from power_core.sampling.filters import draw
from power_core.sampling.sampler import MAX_LOGPROBS, Sampler

__all__ = ["MAX_LOGPROBS", "Sampler", "draw", "reduce_seed", "resolve_seed", "uniform"]
