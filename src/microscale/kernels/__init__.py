"""The ops: contracts, references, costs and kernels. One folder per op."""
