"""The keeper: the writer process of one rank, `python -m sirara.checkpoint.keeper FD`."""

from sirara.checkpoint.job import JobEnd, KeeperSettings, SaveJob


class Keeper:
    """Keeps what lies in an arena: hashes it, gives it to the tiers that are due, reports; rank 0 commits."""

    def __init__(self, settings: KeeperSettings) -> None:
        raise NotImplementedError

    def keep(self, job: SaveJob) -> JobEnd:
        """Does one job to its end; what fails is in the result."""
        raise NotImplementedError
