"""From what a user types to checkpoints: a run's name or folder, a checkpoints folder, or one step's
folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sirara.checkpoint.steps import committed_steps, step_name
from sirara.checkpoint.storage import read_file
from sirara.config.run_folder import RunFolder
from sirara.errors import CheckpointError, ConfigError
from sirara.pure.manifest import MANIFEST, parse_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A folder of steps and the committed ones in it, newest first; or one step's folder (`only`)."""

    folder: Path
    steps: tuple[int, ...] = ()
    only: Path | None = None

    def paths(self) -> Sequence[Path]:
        """Folders of the committed steps, newest first."""
        return [self.only] if self.only else [self.folder / step_name(step) for step in self.steps]

    def path(self, step: int | None) -> Path:
        """The folder of one step, or of the newest. Raises ConfigError or CheckpointError when there is
        none."""
        if self.only is not None:
            if step is not None:
                raise ConfigError(f"{self.only} is one step's folder already; leave out --step {step}")
            return self.only
        if not self.steps:
            raise CheckpointError(f"{self.folder} has no committed checkpoint", code="SR513")
        if step is not None and step not in self.steps:
            known = ", ".join(map(str, self.steps[:8])) + (", ..." if len(self.steps) > 8 else "")
            raise ConfigError(
                f"step {step} has no committed checkpoint in {self.folder}", why=f"there are {known}"
            )
        return self.folder / step_name(self.steps[0] if step is None else step)


def find(target: str) -> Found:
    """The checkpoints that `target` means: a path, the name of a run, the beginning of one, or "latest".

    Raises:  ConfigError when it means nothing.
    """
    path = Path(target)
    if (path / MANIFEST).is_file():
        return Found(folder=path.parent, only=path)
    folder = _folder(path) or RunFolder.find(target).checkpoints
    return Found(folder=folder, steps=tuple(committed_steps(folder)))


def step_folder(target: str, step: int | None = None) -> Path:
    """The folder of one step: of `target` (see `find`), or of "target@N"; the newest step when none is named.

    Raises:  ConfigError or CheckpointError when there is none.
    """
    name, at, number = target.rpartition("@")
    if at and number.isdigit() and not Path(target).exists():
        if step is not None:
            raise ConfigError(f"{target} names a step already; leave out --step {step}")
        return find(name).path(int(number))
    return find(target).path(step)


def step_number(folder: Path) -> int:
    """The step that the name of a folder says; of another name, the one in its manifest."""
    digits = folder.name.removeprefix("step-")
    if digits.isdigit():
        return int(digits)
    return parse_manifest(read_file(folder / MANIFEST), where=str(folder / MANIFEST)).step


def _folder(path: Path) -> Path | None:
    """The folder of steps that a path means, when it is one or holds one."""
    if (path / "checkpoints").is_dir():
        return path / "checkpoints"
    if path.is_dir() and (path.name == "checkpoints" or committed_steps(path)):
        return path
    return None
