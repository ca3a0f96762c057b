"""The entry point. An old Python or a broken package gives one sentence, not a traceback.

Our own modules are imported only after these checks, so a broken installation still gets the advice.
"""

import importlib
import sys

MIN_PYTHON = (3, 11)


def main() -> None:
    """Check the installation, then run the command line."""
    if sys.version_info[:2] < MIN_PYTHON:
        needed, here = ".".join(map(str, MIN_PYTHON)), sys.version.split()[0]
        sys.exit(f"error: Microscale needs Python {needed} or newer; this is {here}.")
    try:
        if _serves(sys.argv[1:]):
            # The engine imports torch while this process imports the command line and the server.
            importlib.import_module("microscale.engine.client.launch").start_ahead()
        # The module of a command is imported when it is called.
        importlib.import_module("microscale.cli").main()
    except ImportError as error:
        name = (error.name or "").split(".")[0]
        if name == "microscale":
            raise
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            sys.exit(
                f"error: this command needs the package {name}, which is not installed; "
                "install Microscale from a checkout or a wheel, with its dependencies"
            )
        sys.exit(
            f"error: the package {name or 'that Microscale needs'} does not import ({error}); "
            f"install {name or 'Microscale'} again, with its dependencies"
        )
    except KeyboardInterrupt:
        sys.exit(130)


def _serves(arguments: list[str]) -> bool:
    """Whether this starts a server, rather than showing the help of `serve`."""
    return arguments[:1] == ["serve"] and not {"-h", "--help"} & set(arguments)


if __name__ == "__main__":
    main()
