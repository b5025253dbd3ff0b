"""What devices say to each other: latency + bytes / bandwidth(bytes), over links or network by who is in the group.

A group whose neighbours are `stride` ranks apart has domain / stride members on one set of links; each brings one
network port, so a ring over nodes runs at the rate of the links or of those ports, whichever is less.  Volumes:
Megatron's tensor parallelism, arXiv:1909.08053; rings: 2 (n - 1) / n of the tensor, arXiv:1910.02054, section 7.
"""

import numpy as np
from numpy.typing import NDArray

from sirara.plan import constants as c
from sirara.plan.constants import Constants
from sirara.plan.kernels import Rates
from sirara.plan.points import Launch, Points

Floats = NDArray[np.float64]


def _bandwidth(r: Rates, k: Constants, ranks: Floats, per_domain: Floats, size: Floats) -> Floats:
    """Bytes per second of a ring over `ranks`, `per_domain` of them on one set of links, for messages of `size`."""
    inside = r.up * size / (size + c.UP_HALF_BYTES * np.minimum(ranks, per_domain))
    # Each of its members in a domain brings one network port.
    ports = np.minimum(r.up, per_domain * r.out * k.network)
    # Trees and rings of nodes take over in larger groups.
    across = ports * size / (size + c.OUT_HALF_BYTES * np.minimum(ranks, 32.0))
    return np.where(ranks > per_domain, np.minimum(inside, across), inside)


def gather_s(r: Rates, k: Constants, size: Floats, ranks: Floats, per_domain: Floats) -> Floats:
    """An all-gather or reduce-scatter whose whole tensor has `size` bytes, as a ring: ranks - 1 steps."""
    nodes = np.maximum(1.0, ranks / per_domain)
    steps = c.RING_S + c.UP_STEP_S * (ranks - nodes) + c.OUT_STEP_S * (nodes - 1)
    rate = _bandwidth(r, k, ranks, per_domain, np.maximum(size, 1.0))
    return np.where(ranks > 1, steps + (ranks - 1) / ranks * size / rate, 0.0)


def all_reduce_s(r: Rates, k: Constants, size: Floats, ranks: Floats, per_domain: Floats) -> Floats:
    """An all-reduce of `size` bytes: a ring; or sums in each node, sums of each port's share over nodes, and back."""
    ring = 2 * gather_s(r, k, size, ranks, per_domain)
    inside = gather_s(r, k, size, per_domain, per_domain)
    nodes = np.maximum(1.0, ranks / per_domain)
    # Over nodes NCCL takes trees where a ring has more steps than it is worth.
    across = gather_s(r, k, size / per_domain, nodes, np.ones(len(size)))
    across = across - c.OUT_STEP_S * np.maximum(0.0, nodes - 1 - np.log2(nodes))
    return np.where(ranks > per_domain, np.minimum(ring, 2 * (inside + across)), ring)


def per_domain(domain: Floats, stride: Floats, ranks: Floats) -> Floats:
    """How many members of a group whose neighbours are `stride` ranks apart share a domain."""
    return np.clip(np.floor(domain / stride), 1.0, ranks)


def tp_s(p: Points, r: Rates, k: Constants) -> Floats:
    """Tensor-parallel traffic of one block's forward (and, once more, of its backward): two all-reduces."""
    size = 2 * p.tokens * p.hidden
    within = per_domain(r.domain, np.ones(len(p)), p.tp)
    # With sequence parallelism the same volume goes as gathers and scattered sums, which are rings.
    rings = 2 * gather_s(r, k, size, p.tp, within)
    return 2 * np.where(p.sequence_parallel > 0, rings, all_reduce_s(r, k, size, p.tp, within))


def tp_waits_s(p: Points, k: Constants) -> Floats:
    """What hosts of a tensor-parallel group wait for each other in one block's forward, at two collectives.

    Hosts launch at times of their own.  A device that has work queued does not notice; one that waits for its host
    waits for the slowest host of its group.
    """
    return 2 * k.sync_s * (p.tp - 1) * np.where(p.launch == Launch.GRAPHS, 0.2, 1.0)


def cp_s(p: Points, r: Rates, k: Constants) -> Floats:
    """Keys and values of the other context-parallel ranks, forward; backward takes twice that."""
    size = 4 * p.micro_batch * p.seq * p.kv_heads * p.head_dim / p.tp
    within = per_domain(r.domain, p.tp, p.cp)
    return gather_s(r, k, size, p.cp, within)


def ep_s(p: Points, r: Rates, k: Constants) -> Floats:
    """Dispatch and combine of one block's forward (and, once more, of its backward)."""
    within = per_domain(r.domain, np.ones(len(p)), p.ep)
    nodes = np.maximum(1.0, p.ep / within)
    tokens = p.tokens / p.tp
    # A token for several experts of one rank is sent there once, and crosses the network once for each node.
    ranks = p.ep * (1 - (1 - 1 / p.ep) ** p.topk)
    size = tokens * np.where(p.dedup > 0, np.minimum(ranks, p.topk), p.topk) * p.hidden * 2
    met = nodes * (1 - (1 - 1 / nodes) ** p.topk)
    met = np.where(p.node_limit > 0, np.minimum(met, p.node_limit), met)
    copies = np.where(p.dedup > 0, np.minimum(met, p.topk), p.topk)
    away = tokens * copies * p.hidden * 2 * (nodes - 1) / nodes
    links = size * (within - 1) / np.maximum(within, 1) / (r.up * k.all_to_all)
    network = away / (r.out * k.all_to_all)
    latency = c.UP_LATENCY_S * 2 + c.OUT_LATENCY_S * np.log2(nodes)
    return np.where((p.ep > 1) & (p.experts > 0), 2 * (np.maximum(links, network) + latency), 0.0)


def pp_s(p: Points, r: Rates, k: Constants) -> Floats:
    """One boundary tensor to the next stage."""
    cut = (p.sequence_parallel > 0) | (p.scatter_gather > 0)
    size = 2 * p.tokens * p.hidden / np.where(cut, p.tp, 1.0)
    inside = p.tp * p.cp * p.dp * p.pp <= r.domain
    rate = np.where(inside, r.up * size / (size + 2 * c.UP_HALF_BYTES), r.out * k.network)
    again = np.where(cut & (p.tp > 1), 2 * p.tokens * p.hidden / r.up, 0.0)
    return np.where(p.pp > 1, c.OUT_LATENCY_S + size / rate + again, 0.0)
