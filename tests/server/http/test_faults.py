"""Errors as clients see them: the table is whole."""

from __future__ import annotations

import pytest

from microscale import errors
from microscale.errors import MicroscaleError
from microscale.server.http import faults


@pytest.mark.parametrize("module", [errors, faults])
def test_every_error_has_a_row_of_its_own(module: object) -> None:
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, MicroscaleError)]
    assert kinds
    assert not [kind.__name__ for kind in kinds if kind not in faults.FAULTS]
