"""Dropout inside a compiled block: the same mask, and one compilation for all microbatches."""

import torch

from sirara.model.dropout import dropout
from sirara.pure.rng import DropoutKey


def test_a_compiled_block_drops_the_same_elements_and_is_not_compiled_again_for_every_microbatch() -> None:
    # The words of the mask became constants of the compiled code: the compiler refused their 64 bits.
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(len(list(graph.graph.nodes)))
        return graph

    def block(x: torch.Tensor, key: DropoutKey | None) -> torch.Tensor:
        return x + dropout(x * 2.0, 0.5, key, 3, "mlp output")

    torch.compiler.reset()
    compiled = torch.compile(block, backend=backend, dynamic=False)
    x = torch.randn(4, 50)
    for step in range(3):
        for microbatch in range(4):
            key = DropoutKey(seed=1, step=step, microbatch=microbatch)
            assert torch.equal(compiled(x, key), block(x, key))
    # One graph before the mask and one after it.
    assert len(graphs) == 2
    torch.compiler.reset()
