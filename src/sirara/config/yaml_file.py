"""YAML read with the line of every key and without the traps of YAML 1.1.

Numbers are decimal (`3e-4` is one, `010` and `1:30` are text), booleans are true and false (`no` is text),
dates are text. A key given twice, a tag, an alias that contains itself and a second document are errors.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from sirara.errors import ConfigError

KeyPath = tuple[str | int, ...]
Above = tuple[yaml.Node, ...]

_DECIMAL = r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|\.[0-9]+([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)"
# kind, pattern, first characters
_RESOLVERS: tuple[tuple[str, str, str], ...] = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", _DECIMAL, "-+0123456789."),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", "~nN"),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Plain and single-quoted text loses what YAML takes for line ends, such as U+0085.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)
for _kind, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        first = [*_first, ""] if _kind == "null" else list(_first)
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern})$"), first)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The mapping in a file, and the line (from 1) of each of its keys and list items.

    Raises:  ConfigError naming file and line for everything that is not one plain mapping.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no file {path}", code="SR101", try_=["sirara init   writes a starter sirara.yaml"]
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset {error.start}",
            code="SR101",
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", code="SR101") from error
    value, lines = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        found = "is empty" if value is None else f"holds a {_kind_of(value)}"
        raise ConfigError(
            f"{path} {found}; a configuration is a mapping of keys such as `model:` and `train:`",
            code="SR101",
        )
    return value, lines


def parse_yaml(text: str, source: str) -> tuple[Any, dict[KeyPath, int]]:
    """The value of one YAML document; `source` names it in errors."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        said = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{source} is not YAML: {said}", code="SR102", where=where) from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{source} is not YAML: {str(error).splitlines()[0]}", code="SR102", where=source
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply", code="SR102", where=source) from error
    lines: dict[KeyPath, int] = {}
    value = None if node is None else _value(node, (), lines, source, ())
    return value, lines


def dump_yaml(value: Any) -> str:
    """YAML text that `parse_yaml` reads back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def _value(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], source: str, above: Above) -> Any:
    where = f"{source}:{node.start_mark.line + 1}"
    if node in above:
        raise ConfigError(f"the alias at {_dotted(path)} contains itself", code="SR102", where=where)
    if isinstance(node, yaml.MappingNode):
        _refuse_tag(node, "map", where)
        return _mapping(node, path, lines, source, above)
    if isinstance(node, yaml.SequenceNode):
        _refuse_tag(node, "seq", where)
        items = []
        for i, item in enumerate(node.value):
            lines.setdefault((*path, i), item.start_mark.line + 1)
            items.append(_value(item, (*path, i), lines, source, (*above, node)))
        return items
    return _scalar(node, where)


def _mapping(
    node: yaml.MappingNode,
    path: KeyPath,
    lines: dict[KeyPath, int],
    source: str,
    above: tuple[yaml.Node, ...],
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError("a key must be a word", code="SR102", where=f"{source}:{line}")
        key = key_node.value
        here = (*path, key)
        if key in result:
            raise ConfigError(
                f"{_dotted(here)} is given twice",
                code="SR103",
                where=f"{source}:{lines[here]} and {source}:{line}",
                try_=["remove one of the two"],
            )
        lines[here] = line
        result[key] = _value(value_node, here, lines, source, (*above, node))
    return result


def _scalar(node: yaml.Node, where: str) -> Any:
    kind, text = node.tag.removeprefix("tag:yaml.org,2002:"), node.value
    try:
        match kind:
            case "str":
                return text
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return int(text.replace("_", ""))
            case "float":
                return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError as error:
        raise ConfigError(f"{text[:40]} is no number that can be read", code="SR102", where=where) from error
    raise ConfigError(
        f"the tag {node.tag} has no meaning here", code="SR102", where=where, try_=["remove the tag"]
    )


def _refuse_tag(node: yaml.Node, kind: str, where: str) -> None:
    if node.tag != f"tag:yaml.org,2002:{kind}":
        raise ConfigError(
            f"the tag {node.tag} has no meaning here", code="SR102", where=where, try_=["remove the tag"]
        )


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _kind_of(value: object) -> str:
    return "list" if isinstance(value, list) else "single value"
