"""Methods that keep no gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def without_gradients(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``torch.inference_mode`` as a decorator that does not import torch before the function is called."""

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with torch.inference_mode():
            return function(*args, **kwargs)

    return run
