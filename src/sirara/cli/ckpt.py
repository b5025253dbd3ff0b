"""`sirara ckpt`: which checkpoints there are, what is in them, whether their bytes are good, and how to mend them."""

import click

from sirara.cli.ckpt_change import pin, prune, reshard
from sirara.cli.ckpt_check import repair, verify, why
from sirara.cli.ckpt_look import diff, ls, show


class Ordered(click.Group):
    """Verbs in the order in which they are given, not by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=Ordered)
def ckpt() -> None:
    """List, compare, verify, repair and thin out checkpoints.

    TARGET is a run (its name, the beginning of it, its folder, or latest), a folder of checkpoints, or one step's
    folder.
    """


for verb in (ls, show, diff, why, verify, repair, reshard, prune, pin):
    ckpt.add_command(verb)
