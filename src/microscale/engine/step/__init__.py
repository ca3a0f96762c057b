"""One step: which tokens run, where their keys and values lie, how the model runs them, and what is sampled."""
