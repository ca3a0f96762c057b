"""Between two steps with drafts: what was accepted, and where the next step is."""
