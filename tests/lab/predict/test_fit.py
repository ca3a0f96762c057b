"""``bench fit``: what the shipped rows say of rows left out, and that derived figures in the files are up to date."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from microscale.cli import app
from microscale.hardware import FAMILY_OF_SM
from microscale_lab.predict import fit, whole_models

pytestmark = pytest.mark.nightly

SM90 = FAMILY_OF_SM[90]
FILE = whole_models.file_of("sm90")


def test_sums_of_kernels_in_the_file_are_those_of_today() -> None:
    """After a change of rows or of the fit: ``microscale bench fit --write``."""
    file = whole_models.read(FILE)
    for old, new in zip(file.rows, fit.recounted(file).rows, strict=True):
        assert old.kernels_us == pytest.approx(new.kernels_us, rel=0.01), old.case
    assert file.to_json() == FILE.read_text()


def test_whole_models_left_out_are_predicted() -> None:
    """The rows of docs/benchmarks.md. The bar is a median of 4 % once the sweep was recorded; these are 25 rows."""
    found = fit.score(fit.held_models(whole_models.read(FILE).rows))
    assert found.rows >= 25
    assert found.median_error < 0.05
    assert found.within_12 >= 0.85
    assert found.inside >= 0.8
    assert found.median_width < 0.2


def test_kernels_left_out_are_predicted() -> None:
    """The tail is of groups with three or four rows far apart."""
    found = fit.score(fit.held_kernels(SM90))
    assert found.rows > 150
    assert found.median_error < 0.06
    assert found.within_12 > 0.7


def test_the_command_names_groups_and_rows() -> None:
    done = CliRunner().invoke(app, ["bench", "fit"])
    assert done.exit_code == 0, done.output
    text = done.output
    for word in ("moe triton_w4a16 small batch, direct", "kernels, each left out", "whole models, each left out"):
        assert word in text
