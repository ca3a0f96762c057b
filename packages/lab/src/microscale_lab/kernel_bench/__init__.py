"""Times of single kernels, each checked against its reference first (``microscale bench kernels``)."""
