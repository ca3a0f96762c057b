"""``small``: everything between the matrix products: norms, rotary positions, KV writes, routing."""
