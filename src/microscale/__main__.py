"""``python -m microscale``: the command line without the installed script."""

from microscale.cli import main

main()
