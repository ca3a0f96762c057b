"""``attention``: grouped heads over paged KV, with sinks and sliding windows."""
