"""Which implementation runs each op, and why."""
