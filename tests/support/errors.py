"""The error norms and bounds of the package's kernel cases, under the name that the tests use."""

from microscale.prove.cases.errors import Errors, assert_close, errors, rms_step, step

__all__ = ["Errors", "assert_close", "errors", "rms_step", "step"]
