"""The commands of the lab. Each module imports its heavy parts inside the command, so that ``--help`` is quick."""
