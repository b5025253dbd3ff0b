"""What a unit is told about its surroundings: who shares its work, when weight gradients are made, what is not kept.

    axis         the ranks that hold the other parts of every matrix (tensor parallelism); alone by default
    deferral     backward of a linear layer gives the input's gradient at once, the weights' later (zero bubble)
    recompute    what is made again by the backward that reads it: outputs of norms and of activation functions, or
                 all that lies between two matrix products (`Again`)

The model declares what it needs; parallel/tensor.py implements `Axis`.

Shape letters: T tokens of a microbatch (B * L), D features, N any length, t ranks of the axis.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """A tensor on its way."""

    def wait(self) -> Tensor:
        """The tensor, once it is complete; call it once."""
        ...


class Axis(Protocol):
    """The tensor-parallel axis.  All its ranks make the same calls in the same order and get equal bits.

    sequence: between linear layers a rank holds T / t tokens, its contiguous share of the flattened [B, L].

    What is passed in belongs to the axis until `wait()`, which may return the same memory.
    """

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def sequence(self) -> bool: ...

    def sum(self, x_TD: Tensor) -> Pending:
        """[T, D] summed over the ranks."""
        ...

    def scatter_sum(self, x_TD: Tensor) -> Pending:
        """[T / t, D]: this rank's tokens of the sum over the ranks."""
        ...

    def gather_tokens(self, x_SD: Tensor) -> Pending:
        """[T, D] from every rank's [T / t, D]."""
        ...

    def gather_small(self, row_N: Tensor) -> Tensor:
        """[t, N]: every rank's row."""
        ...


class Job(Protocol):
    """One layer's weight gradients, to be made later."""

    def run(self) -> Iterable[tuple[Tensor, Tensor]]:
        """(leaf, gradient) for every leaf that wants one."""
        ...


@dataclass(slots=True)
class Jobs:
    """The weight gradients that one backward pass left over."""

    jobs: list[Job]

    @torch.no_grad()
    def run(self) -> dict[int, Tensor]:
        """Gradients by `id` of their leaf, which still lives; what they were made from is let go.  Call it once."""
        grads: dict[int, Tensor] = {}
        # In the order of backward; every job's tensors are free before the next one starts.
        self.jobs.reverse()
        while self.jobs:
            for leaf, grad in self.jobs.pop().run():
                known = grads.get(id(leaf))
                grads[id(leaf)] = grad if known is None else known + grad
        return grads


@dataclass(slots=True)
class Deferral:
    """Split backward: while `active`, linear layers only give dx and leave their weight gradients as jobs here.

    deferral.active = True
    grads = autograd.grad(y, [x, *leaves], dy, allow_unused=True)     None for the leaves of linear layers
    jobs = deferral.take()
    ...
    jobs.run()                                                        {id(leaf): gradient}
    """

    active: bool = False
    _jobs: list[Job] = field(default_factory=list)

    def keep(self, job: Job) -> None:
        """Called by backward."""
        self._jobs.append(job)

    def take(self) -> Jobs:
        """What backward left since the last call."""
        jobs, self._jobs = Jobs(self._jobs), []
        return jobs


class Sink(Protocol):
    """Where gradients may be written as they are made, which saves a copy."""

    def places(self, leaves: Sequence[Tensor], *, onto: bool) -> Sequence[Tensor] | None:
        """A tensor like each leaf, to be filled and returned as its gradient; None: nowhere in particular.

        onto: one that the gradient is to be added to instead, and returned.
        """
        ...


@dataclass(frozen=True, slots=True)
class Remake:
    """How to make a tensor again instead of keeping it: make(*tensors), equal in bits.

    at_once: by the backward that meets it, also where weight gradients are put off: it needs matrices.
    """

    make: Callable[..., Tensor]
    tensors: Sequence[Tensor]
    at_once: bool = False


@dataclass(slots=True)
class Wiring:
    """One unit's surroundings, shared by its modules; axis None: alone.

    sink: also says that whoever asks for gradients takes a sparse one of an embedding: few rows of a vocabulary occur.
    """

    axis: Axis | None = None
    deferral: Deferral | None = None
    sink: Sink | None = None
    recompute: frozenset[str] = frozenset()
    """Of `pure.recompute.MODULES`."""

    @property
    def size(self) -> int:
        return 1 if self.axis is None else self.axis.size

    @property
    def rank(self) -> int:
        return 0 if self.axis is None else self.axis.rank

    @property
    def sequence(self) -> bool:
        """Whether hidden states are this rank's share of the tokens."""
        return self.axis is not None and self.axis.sequence

    def makes_again(self, module: str) -> bool:
        """Whether backward makes it again.  Compiled code decides by itself what it keeps."""
        return module in self.recompute and torch.is_grad_enabled() and not torch.compiler.is_compiling()

    def remake(self, module: str, make: Callable[..., Tensor], *tensors: Tensor) -> Remake | None:
        """make(*tensors) for the backward of its reader, if it is not to be kept."""
        return Remake(make, tensors) if self.makes_again(module) else None
