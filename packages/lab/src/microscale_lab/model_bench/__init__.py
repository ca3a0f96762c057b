"""Measurements of a whole model besides its speed: loading, the parts of a step, drafts."""
