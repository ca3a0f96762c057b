"""Dense layers: reference and dequantized, every weight format, bias and residual, chunked rows."""

from __future__ import annotations

import pytest
import torch

from microscale import hardware
from microscale.errors import Unsupported
from microscale.formats import MXFP4, MXFP8, decode, encode
from microscale.kernels.dense import reference
from microscale.kernels.dense.cost import dense_flops, weight_bytes
from microscale.kernels.dense.dequantized import DequantizedDense
from microscale.kernels.dense.reference import ReferenceDense, dense
from microscale.kernels.dense.spec import DenseSpec, DenseWeights
from microscale.kernels.op import Activations


def make(fmt: str, rows: int, columns: int, bias: bool) -> tuple[DenseWeights, torch.Tensor]:
    """Weights in ``fmt`` and what they mean in float64."""
    generator = torch.Generator().manual_seed(rows)
    plain = torch.randn(rows, columns, generator=generator).bfloat16()
    b = torch.randn(rows, generator=generator).bfloat16() if bias else None
    if fmt == "bf16":
        return DenseWeights(plain, b), plain.double()
    tensor = encode(plain, {"mxfp4": MXFP4, "mxfp8": MXFP8}[fmt])
    return DenseWeights(tensor, b), decode(tensor, torch.float64)


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8", "mxfp4"])
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(40, 64, 3), (7, 32, 1), (64, 96, 0)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("implementation", [ReferenceDense(), DequantizedDense()], ids=lambda i: i.name)
def test_against_float64(
    fmt: str, rows: int, columns: int, tokens: int, bias: bool, implementation: ReferenceDense | DequantizedDense
) -> None:
    weights, exact = make(fmt, rows, columns, bias)
    generator = torch.Generator().manual_seed(1)
    x, residual = torch.randn(tokens, columns, generator=generator), torch.randn(tokens, rows, generator=generator)
    spec = DenseSpec(rows, columns, weights.format, Activations.FLOAT32, bias, tokens)
    assert spec.weight_format == fmt
    assert implementation.supports(spec, hardware.cpu()) is None
    packed = implementation.pack(weights, spec)
    want = x.double() @ exact.T
    if weights.bias is not None:
        want = want + weights.bias.double()
    torch.testing.assert_close(implementation.run(packed, spec, hardware.cpu(), x).double(), want, rtol=1e-5, atol=1e-4)
    with_residual = implementation.run(packed, spec, hardware.cpu(), x, residual)
    torch.testing.assert_close(with_residual.double(), want + residual, rtol=1e-5, atol=1e-4)


def test_rows_in_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, _ = make("bf16", 50, 32, bias=True)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    whole = dense(x, weights)
    monkeypatch.setattr(reference, "CHUNK_ROWS", 16)
    torch.testing.assert_close(dense(x, weights), whole, rtol=1e-6, atol=1e-5)


def test_cost_counts_the_formats_own_bytes() -> None:
    sizes = {
        f: weight_bytes(DenseSpec(201088, 2880, f, Activations.BF16, False, 1)) for f in ("bf16", "mxfp8", "mxfp4")
    }
    assert sizes == {"bf16": 201088 * 2880 * 2, "mxfp8": 201088 * 90 * 33, "mxfp4": 201088 * 90 * 17}
    assert dense_flops(DenseSpec(8, 4, "bf16", Activations.BF16, False, 3)) == 2 * 3 * 8 * 4


def test_refusals() -> None:
    for implementation in (ReferenceDense(), DequantizedDense()):
        unknown = DenseSpec(8, 32, "int4", Activations.BF16, False, 1)
        assert "int4" in (implementation.supports(unknown, hardware.cpu()) or "")
    with pytest.raises(Unsupported, match="two axes"):
        DenseWeights(torch.zeros(2, 3, 4))
