"""What the nodes of an attempt hold, seen by all its ranks while they restore: a server on each, and the door to them.

The keepers of the attempt before may be gone; what lies in a node's folders is served by whoever runs there now.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sirara.checkpoint.image import Image
from sirara.checkpoint.link import own_host
from sirara.checkpoint.nodes import NodeTiers, is_node_tier
from sirara.checkpoint.serve import NodeView, RemoteNode
from sirara.config.schema import TierConfig
from sirara.errors import InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeViews:
    """views: node -> what it holds; none without node tiers.

    decode: (node, step, uuid, rank): has the node decode a rank's image from parity into its own memory.
    """

    views: dict[int, NodeView] = field(default_factory=dict)
    decode: Callable[[int, int, str, int], Image] | None = None


@contextmanager
def open_nodes(
    tiers: Sequence[TierConfig],
    *,
    run: str,
    rank: int,
    world: int,
    local_size: int,
    node: int,
    attempt: int,
    token: str,
    memory: Path,
    texts: Callable[[str], Sequence[str]],
) -> Iterator[NodeViews]:
    """Serves this node's generations and knows the way to the others'.  Collective.

    texts: this rank's text to all ranks, in rank order.  The other arguments are those of NodeTiers.
    """
    if not any(is_node_tier(tier) for tier in tiers):
        yield NodeViews()
        return
    host = own_host(os.environ.get("MASTER_ADDR", "localhost")) if world > local_size else "127.0.0.1"
    nodes = NodeTiers(
        tiers,
        run=run,
        rank=rank,
        world=world,
        local_size=local_size,
        node=node,
        attempt=attempt,
        token=token,
        memory=memory,
        host=host,
    )
    try:
        nodes.meet(dict(enumerate(texts(nodes.address))))
        views = dict(enumerate(nodes.nodes()))

        def decode(at: int, step: int, uuid: str, image_of: int) -> Image:
            view = views[at]
            if at == node:
                return nodes.rebuild(step, uuid, image_of)
            if not isinstance(view, RemoteNode):
                raise InvariantError(f"node {at} is not this one, and its view is none of another")
            return view.rebuild(step, uuid, image_of)

        yield NodeViews(views=views, decode=decode)
    finally:
        nodes.close()
