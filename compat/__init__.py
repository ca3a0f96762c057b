"""Real clients against the real server, each in an environment of its own: ``make test-clients``."""
