"""The MLP half of a block: SwiGLU (gate and up from one matrix product) or GELU."""

from torch import Tensor, nn

from sirara.model.again import Again
from sirara.model.attention import weights_and_biases
from sirara.model.linear import linear
from sirara.model.ops import gelu_tanh, swiglu
from sirara.model.split import Remake
from sirara.model.weights import Making, Norm, Weights
from sirara.pure.shape import ModelShape


class Mlp(nn.Module):
    """mlp(norm(x_BLD)) -> [B, L, D], or any [..., D]."""

    def __init__(self, shape: ModelShape, making: Making) -> None:
        super().__init__()
        self.wiring = making.wiring
        self.transposed = shape.traits.conv1d
        self.gated = shape.traits.mlp == "swiglu"
        self._inner: list[Weights] = []
        for name in ("gate_proj", "up_proj") if self.gated else ("up_proj",):
            weights = Weights(f"mlp.{name}", making)
            self.add_module(name, weights)
            self._inner.append(weights)
        self.down_proj = Weights("mlp.down_proj", making)

    def forward(self, x_BLD: Tensor, norm: Norm) -> Tensor:
        activation = swiglu if self.gated else gelu_tanh
        if self.wiring.makes_again("mlp"):
            used = [p for part in (norm, *self._inner) for p in part.parameters()]
            again = Again(lambda x: activation(self._wide(x, norm, None)), used)
            a, remake = again.forward(x_BLD)
        else:
            h = self._wide(x_BLD, norm, norm.remake(x_BLD))
            a, remake = activation(h), self.wiring.remake("act", activation, h)
        return linear(
            a,
            *weights_and_biases([self.down_proj]),
            transposed=self.transposed,
            part="row",
            wiring=self.wiring,
            remake=remake,
        )

    def _wide(self, x_BLD: Tensor, norm: Norm, remake: Remake | None) -> Tensor:
        """remake: of the norm's output, see `linear`."""
        return linear(
            norm(x_BLD),
            *weights_and_biases(self._inner),
            transposed=self.transposed,
            wiring=self.wiring,
            remake=remake,
        )
