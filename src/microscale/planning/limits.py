"""What a request may ask of the ops at most. Without torch: the server checks requests in a process that has none."""

from microscale.kernels.sampling.limits import MAX_TOP_LOGPROBS

__all__ = ["MAX_TOP_LOGPROBS"]
