"""The MLP half of a block: SwiGLU (gate and up from one matrix product) or GELU."""

from torch import Tensor, nn

from sirara.model.attention import weights_and_biases
from sirara.model.linear import linear
from sirara.model.ops import gelu_tanh, swiglu
from sirara.model.split import Remake
from sirara.model.weights import Making, Weights
from sirara.pure.shape import ModelShape


class Mlp(nn.Module):
    """x_BLD -> x_BLD, or any [..., D].  remake: of x, see `linear`."""

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

    def forward(self, x_BLD: Tensor, remake: Remake | None = None) -> Tensor:
        h = linear(
            x_BLD,
            *weights_and_biases(self._inner),
            transposed=self.transposed,
            wiring=self.wiring,
            remake=remake,
        )
        activation = swiglu if self.gated else gelu_tanh
        return linear(
            activation(h),
            *weights_and_biases([self.down_proj]),
            transposed=self.transposed,
            part="row",
            wiring=self.wiring,
            remake=self.wiring.remake(activation, h),
        )
