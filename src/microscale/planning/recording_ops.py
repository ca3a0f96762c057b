"""An ``Ops`` that binds nothing and lists what it was asked for: how plans, memory and predictions learn what a model
uses, without its weights and without a second description of it.

``models/outline.py`` builds a model on shape-only weights with it. No decision is made and nothing is packed: a model
of 36 layers takes ten milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from microscale import hardware
from microscale.formats import ShapeOnly
from microscale.kernels.attention.spec import AttentionSpec
from microscale.kernels.dense.spec import DenseWeights
from microscale.kernels.moe.spec import Gate
from microscale.kernels.op import Activations
from microscale.kernels.recurrent.spec import RecurrentSpec, RecurrentWeights
from microscale.kernels.sampling.spec import SamplingSpec
from microscale.kernels.small.spec import SmallSpec
from microscale.planning.choose_kernel import Preference
from microscale.planning.ops import Ops, dense_spec, moe_spec
from microscale.planning.plan import Use
from microscale.planning.quantise import Weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Unbound:
    """Stands where a bound op would. Nobody may call it: a model is recorded as it is built, not as it runs."""

    def bind_mlp(self, gate_up: Unbound, down: Unbound) -> None:
        """Both are listed already."""


def _is_part(weight: object, table: object) -> bool:
    """Whether it is the table or, of one rank, some rows of it: the checkpoint holds them once."""
    return table is not None and (weight is table or (isinstance(weight, ShapeOnly) and weight.table is table))


class RecordingOps(Ops):
    """Lists the uses of a model that is built with it."""

    def __init__(self, activations: Activations) -> None:
        # No decision is made, so any machine will do.
        super().__init__(hardware.cpu(), activations, Preference())
        self.layers: list[list[Use]] = [[]]
        """The uses of each decoder layer in the order of binding; the last entry is what is outside of them."""
        self.weight_bytes = 0
        """Of what was bound, as the checkpoint has it; a tensor that is embedding and lm_head counts once."""
        self.tied = False
        """One tensor is bound as embedding and as a dense layer."""
        self._table: Weight | None = None

    @property
    def dtype(self) -> torch.dtype:
        """None: shapes have no numbers whose type could change."""
        return cast("torch.dtype", None)

    def computed(self, make: Callable[[], Any]) -> Any:
        return Unbound()

    def layer_done(self) -> None:
        """Called when a decoder layer is complete."""
        self.layers.append([])

    def experts(
        self,
        layer: str,
        gate_up: Weight,
        down: Weight,
        top_k: int,
        gate: Gate,
        biases: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Any:
        spec = moe_spec(gate_up, self.activations, top_k, gate, bias=biases[0] is not None)
        return self._note("moe", layer, spec, gate_up, down, *biases)

    def dense(
        self, layer: str, weights: DenseWeights, softcap: float | None = None, *, behind_sum: bool = False
    ) -> Any:
        self.tied |= weights.weight is self._table
        held = () if _is_part(weights.weight, self._table) else (weights.weight,)
        spec = dense_spec(weights, self.activations, softcap, behind_sum)
        return self._note("dense", layer, spec, *held, weights.bias)

    def embed(self, weight: Weight) -> Any:
        self._table = weight
        self.weight_bytes += weight.nbytes
        return Unbound()

    def attention(self, layer: str, spec: AttentionSpec, sinks: Tensor | None) -> Any:
        return self._note("attention", layer, spec)

    def recurrent(self, layer: str, spec: RecurrentSpec, weights: RecurrentWeights) -> Any:
        return self._note("recurrent", layer, spec)

    def small(self, spec: SmallSpec, layer: str = "small") -> Any:
        return self._note("small", layer, spec)

    def sampling(self, vocab: int) -> Any:
        return self._note("sampling", "sampling", SamplingSpec(vocab, tokens=1))

    def _note(self, op: str, layer: str, spec: Any, *weights: Weight | None) -> Unbound:
        self.layers[-1].append(Use(op, layer, spec))
        self.weight_bytes += sum(weight.nbytes for weight in weights if weight is not None)
        return Unbound()
