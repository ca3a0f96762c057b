"""The entry point: a Python that is too old or a package that does not import is one sentence, not a traceback.

Nothing of ours is imported before that is known, so that the advice also reaches those whose installation is broken.
"""

import importlib
import sys

MIN_PYTHON = (3, 11)


def main() -> None:
    """Check what the command line stands on, then run it."""
    if sys.version_info[:2] < MIN_PYTHON:
        needed, here = ".".join(map(str, MIN_PYTHON)), sys.version.split()[0]
        sys.exit(f"error: Microscale needs Python {needed} or newer; this is {here}.")
    try:
        if _serves(sys.argv[1:]):
            # The engine imports torch while this process imports the command line and the server.
            importlib.import_module("microscale.engine.client.launch").start_ahead()
        # A command's own module is imported when it is called.
        importlib.import_module("microscale.cli").main()
    except ImportError as error:
        name = (error.name or "").split(".")[0]
        if name == "microscale":
            raise
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            sys.exit(
                f"error: this command needs the package {name}, which is not installed; "
                "install Microscale with its dependencies: pip install microscale"
            )
        sys.exit(
            f"error: the package {name or 'that Microscale needs'} does not import ({error}); "
            f"install Microscale again with its dependencies: pip install --force-reinstall {name or 'microscale'}"
        )
    except KeyboardInterrupt:
        sys.exit(130)


def _serves(arguments: list[str]) -> bool:
    """Whether this is a server, and not the question what its options are."""
    return arguments[:1] == ["serve"] and not {"-h", "--help"} & set(arguments)


if __name__ == "__main__":
    main()
