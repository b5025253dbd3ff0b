"""What blocks make again in backward, in words: a recipe per stage, which deals kinds to the stage's blocks in order.

    norm+act                every block: outputs of norms and of the activation function
    full:2 mlp:3 norm       the first two whole, of three more the MLP, of all others outputs of norms
    [full:4, 2, none]       a recipe for each stage, virtual ones too; a number n is `full:n`

Configuration, executor and planner read recipes here, so they cannot differ.
"""

from collections.abc import Sequence

MODULES = ("norm", "act", "attention", "mlp")
"""norm: outputs of norms.  act: output of the MLP's activation function.  attention: all between the products with
its matrices.  mlp: all between the hidden state and the product with its last matrix, its norm included."""

Kinds = frozenset[str]
"""Modules, or `full` alone: the whole block."""
Recipe = str | int
Setting = str | int | Sequence[Recipe]
"""Of `train.recompute`: one recipe for every stage, or one for each."""

NONE: Kinds = frozenset()
FULL: Kinds = frozenset({"full"})
_ALIASES = {"none": NONE, "selective": frozenset({"norm", "act"}), "full": FULL}


def parse(recipe: Recipe) -> tuple[tuple[Kinds, int | None], ...]:
    """(kinds, of how many blocks) in order; None: all that are left.

    Raises:  ValueError with what is wrong, in words.
    """
    if isinstance(recipe, int):
        if recipe < 0:
            raise ValueError(f"{recipe} blocks are fewer than none")
        return ((FULL, recipe),)
    parts = recipe.split()
    if not parts:
        raise ValueError("is empty; none says that nothing is computed again")
    found: list[tuple[Kinds, int | None]] = []
    for part in parts:
        name, colon, count = part.partition(":")
        if colon and not count.isdecimal():
            raise ValueError(f"{part}: after the colon stands a number of blocks")
        if not colon and part is not parts[-1]:
            raise ValueError(f"{part} takes all blocks that are left, so nothing can follow it")
        found.append((_kinds(name), int(count) if colon else None))
    return tuple(found)


def kinds_of_blocks(setting: Setting, *, stage: int, blocks: int) -> tuple[Kinds, ...]:
    """What each block of a stage makes again; a recipe for more blocks than there are gives to those that are."""
    recipe = setting if isinstance(setting, str | int) else setting[stage]
    dealt: list[Kinds] = []
    for kinds, count in parse(recipe):
        dealt += [kinds] * (blocks - len(dealt) if count is None else min(count, blocks - len(dealt)))
    return (*dealt, *[NONE] * (blocks - len(dealt)))


def all_kinds(setting: Setting) -> frozenset[Kinds]:
    """Every combination of kinds that some block may have, `NONE` left out."""
    recipes = [setting] if isinstance(setting, str | int) else setting
    return frozenset(k for recipe in recipes for k, count in parse(recipe) if k and count != 0)


def keeps_little(setting: Setting) -> bool:
    """Whether some block makes more again than what is cheap, so that it keeps less than its weight gradients need."""
    return any(kinds - {"norm", "act"} for kinds in all_kinds(setting))


def most_blocks(recipe: Recipe) -> int:
    """Blocks that a recipe counts out; a recipe for fewer blocks than a stage has is complete all the same."""
    return sum(count or 0 for _, count in parse(recipe))


def recipe_of(dealt: Sequence[tuple[Kinds, int]], blocks: int) -> Recipe:
    """The shortest recipe that deals kinds to so many blocks of a stage, in order; the rest make nothing again."""
    parts = [(kinds, n) for kinds, n in dealt if n > 0]
    if not any(kinds for kinds, _ in parts):
        return "none"
    if len(parts) == 1 and parts[0][1] >= blocks:
        return name_of(parts[0][0])
    if len(parts) == 1 and parts[0][0] == FULL:
        return parts[0][1]
    used, words = 0, []
    for kinds, n in parts:
        used += n
        words.append(name_of(kinds) if used >= blocks else f"{name_of(kinds)}:{n}")
    return " ".join(words)


def name_of(kinds: Kinds) -> str:
    """As a recipe spells it."""
    for alias, same in _ALIASES.items():
        if kinds == same:
            return alias
    return "+".join(m for m in MODULES if m in kinds)


def _kinds(name: str) -> Kinds:
    if name in _ALIASES:
        return _ALIASES[name]
    kinds = name.split("+")
    for kind in kinds:
        if kind not in MODULES:
            raise ValueError(
                f"{kind!r} is nothing that can be computed again by itself; "
                f"there are {', '.join(MODULES)} (joined by +), none, selective and full"
            )
    return frozenset(kinds)
