"""From what the user asked for to an engine that is ready: device, plan, memory, weights."""
