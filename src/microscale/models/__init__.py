"""Models: what they are (config), where their numbers come from (checkpoint, dummy), and how they compute."""
