"""What pydantic found wrong, as a ConfigError that names key, file and line, value and nearest key."""

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sirara.config.schema import RunConfig
from sirara.config.yaml_file import KeyPath
from sirara.errors import ConfigError


def complaint(
    error: ValidationError, given: dict[str, Any], origin: Callable[[KeyPath], str], source: str
) -> ConfigError:
    """One error for all that is wrong: the first in full, the others in a word each."""
    found = _one_per_key(error)
    first, *others = (_describe(path, detail, given) for path, detail in found)
    what, try_ = first
    path = found[0][0]
    where = origin(path) or source
    why = "" if not others else "also: " + "; ".join(what for what, _ in others[:5])
    return ConfigError(what, code=_code(found[0][1]["type"]), where=where, why=why, try_=try_)


def section_keys(path: KeyPath) -> list[str] | None:
    """The keys of the section at a path, as the file spells them; None where there is no section."""
    model: type[BaseModel] | None = RunConfig
    for word in path:
        if isinstance(word, int) or model is None:
            continue
        fields = {info.alias or name: info for name, info in model.model_fields.items()}
        if word not in fields:
            return None
        model = next(iter(_sections(fields[word].annotation)), None)
    return None if model is None else [info.alias or name for name, info in model.model_fields.items()]


def _one_per_key(error: ValidationError) -> list[tuple[KeyPath, ErrorDetails]]:
    """Details by key. A union reports each of its members, under a path with their names, which we drop."""
    by_key: dict[KeyPath, ErrorDetails] = {}
    for detail in error.errors(include_url=False):
        path = _real_path(detail["loc"])
        kept = by_key.get(path)
        # Of a union's members the one that fails on its own terms says more than "not a Literal".
        if kept is None or (_is_type_error(kept["type"]) and not _is_type_error(detail["type"])):
            by_key[path] = detail
    # An unknown key is most often why another one is missing.
    return sorted(by_key.items(), key=lambda item: item[1]["type"] != "extra_forbidden")


def _is_type_error(kind: str) -> bool:
    return kind.endswith(("_type", "_parsing", "_error"))


def _real_path(loc: tuple[int | str, ...]) -> KeyPath:
    path: KeyPath = ()
    for i, word in enumerate(loc):
        keys = section_keys(path)
        if isinstance(word, str) and keys is None:
            break
        if isinstance(word, str) and keys is not None and word not in keys and i < len(loc) - 1:
            break
        path = (*path, word)
    return path


def _describe(path: KeyPath, detail: ErrorDetails, given: dict[str, Any]) -> tuple[str, list[str]]:
    key, kind, found = ".".join(map(str, path)), detail["type"], _at(given, path)
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key {key}", _nearest(path)
    if kind == "missing":
        return f"{key} is missing", [f"{key}=..."]
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        keys = section_keys(path) or []
        return f"{key} must be a section with keys, found {_show(found)}", [
            f"keys of {key}: {', '.join(keys)}"
        ]
    if kind == "literal_error":
        choices = _choices(path) or str(context["expected"]).replace("'", "").split(" or ")
        near = get_close_matches(str(found), choices, n=1)
        forms = list(dict.fromkeys(_forms(_annotation(path))))
        return f"{key} must be {_or([*choices, *forms])}, found {_show(found)}", [
            f"{key}={near[0]}"
        ] if near else []
    choices = _choices(path)
    alternative = f" or {_or(choices)}" if choices else ""
    if kind == "value_error":
        return f"{key}={_show(found)} {context['error']}", []
    limits = {
        "greater_than": ("gt", "above"),
        "greater_than_equal": ("ge", "at least"),
        "less_than": ("lt", "below"),
        "less_than_equal": ("le", "at most"),
    }
    if kind in limits:
        name, words = limits[kind]
        limit = context[name]
        return f"{key} must be {words} {limit:g}{alternative}, found {_show(found)}", []
    if kind in ("too_short", "too_long", "missing_argument", "unexpected_positional_argument"):
        return f"{key} has a wrong length: {detail['msg'].lower()}, found {_show(found)}", []
    expected = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "string_type": "text",
        "string_too_short": "text that is not empty",
        "list_type": "a list",
        "tuple_type": "a list",
        "string_pattern_mismatch": f"text like {context.get('pattern')}",
    }.get(kind)
    if expected is None:
        return f"{key}={_show(found)}: {detail['msg']}", []
    return f"{key} must be {expected}{alternative}, found {_show(found)}", _repair(key, kind, found)


def _repair(key: str, kind: str, found: Any) -> list[str]:
    if kind in ("int_type", "int_from_float") and isinstance(found, float) and found.is_integer():
        return [f"{key}={found:.0f}"]
    if isinstance(found, str) and found.startswith("0") and found.isdecimal():
        return [f"{key}={int(found)}"]
    if kind == "string_type" and isinstance(found, int | float):
        return [f"{key}=\"'{found}'\""]
    if kind == "bool_type" and str(found).lower() in ("yes", "on", "1", "no", "off", "0"):
        return [f"{key}={'true' if str(found).lower() in ('yes', 'on', '1') else 'false'}"]
    return []


def _nearest(path: KeyPath) -> list[str]:
    """Where the key may belong: a near word of its section, the same word elsewhere, a near one elsewhere."""
    *section, word = path
    keys = section_keys(tuple(section)) or []
    prefix = ".".join(map(str, section))
    everywhere = list(_all_keys(RunConfig))
    lines = [f"nearest key: {'.'.join(filter(None, (prefix, near)))}" for near in _close(str(word), keys)]
    if not lines:
        same = [key for key in everywhere if key.rpartition(".")[2] == word]
        last = {key.rpartition(".")[2]: key for key in everywhere}
        same = same or [last[near] for near in _close(str(word), list(last))]
        lines = [f"nearest key: {key}" for key in same[:3]]
    return [*lines, f"keys of {prefix or 'the file'}: {', '.join(keys)}"]


def _close(word: str, keys: list[str]) -> list[str]:
    return get_close_matches(word.lower().replace("-", "_"), keys, n=1, cutoff=0.7)


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        key = prefix + (info.alias or name)
        yield key
        for section in _sections(info.annotation):
            yield from _all_keys(section, f"{key}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The section classes inside a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated, list):
        for part in get_args(annotation):
            yield from _sections(part)


def _choices(path: KeyPath) -> list[str]:
    """The words that a field takes, if it takes words."""
    return [str(word) for word in _words(_annotation(path))]


def _annotation(path: KeyPath) -> Any:
    """A field's type; Any for what is no field."""
    keys = section_keys(path[:-1])
    if keys is None or not path or isinstance(path[-1], int):
        return Any
    model: type[BaseModel] = RunConfig
    for word in (word for word in path[:-1] if not isinstance(word, int)):
        fields = {info.alias or name: info for name, info in model.model_fields.items()}
        model = next(iter(_sections(fields[word].annotation)))
    info = next((info for name, info in model.model_fields.items() if (info.alias or name) == path[-1]), None)
    return Any if info is None else info.annotation


def _forms(annotation: Any) -> Iterator[str]:
    """What else than words a field takes."""
    if get_origin(annotation) in (Union, UnionType, Annotated):
        for part in get_args(annotation):
            yield from _forms(part)
    elif get_origin(annotation) is list:
        yield "a list"
    elif annotation is int:
        yield "a whole number"


def _words(annotation: Any) -> Iterator[object]:
    if get_origin(annotation) in (Union, UnionType, Annotated):
        for part in get_args(annotation):
            yield from _words(part)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif annotation is type(None):
        yield "null"


def _at(given: Any, path: KeyPath) -> Any:
    for word in path:
        try:
            given = given[word]
        except (KeyError, IndexError, TypeError):
            return None
    return given


def _show(value: Any) -> str:
    text = (
        "nothing (null)" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    )
    return text if len(text) <= 60 else text[:57] + "..."


def _or(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _code(kind: str) -> str:
    return {"extra_forbidden": "SR105", "missing": "SR106"}.get(kind, "SR107")
