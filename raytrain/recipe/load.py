"""YAML and `--set a.b=c` to a Recipe and back. Each mistake is told in one line with its place."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import RootModel, ValidationError
from pydantic_core import ErrorDetails

from raytrain.errors import RaytrainError
from raytrain.recipe.types import Recipe

Keys = tuple[int | str, ...]

_BUILTIN_DIR = Path(__file__).parents[1] / "recipes"
_ERRORS_SHOWN = 3


class _Loader(yaml.SafeLoader):
    """SafeLoader that takes 1e-4 for a number: YAML 1.1 wants 1.0e-4 and calls the rest text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def builtin_recipes() -> list[str]:
    """Return the names of the recipes that come with raytrain, sorted."""
    return sorted(path.stem for path in _BUILTIN_DIR.glob("*.yaml"))


def load_recipe(path_or_builtin_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a YAML file, or one that comes with raytrain by its name.

    `overrides` are texts such as `phases.0.batch=64` or `schedule.lr=1e-3` that replace values
    of the file. Raises RaytrainError with one line: file, line, key, what to do.
    """
    path = _find(path_or_builtin_name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RaytrainError(f"{path}: can't be read as text: {error}") from error
    # A built-in recipe goes by its name: where it is installed is no help in a message.
    name = path.name if path.parent == _BUILTIN_DIR else str(path)
    data, root = _parse(text, name)
    return _build(data, _Source(name, root), overrides)


def recipe_from_dict(d: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Build a recipe from plain values, nested as in the YAML; overrides as for load_recipe."""
    return _build(dict(d), _Source("recipe"), overrides)


def change_recipe(recipe: Recipe, values: Mapping[str, Any], where: str) -> Recipe:
    """Return the recipe with the values at some paths such as `phases.0.batch` replaced.

    A value may be a whole curve, as a list of pieces. `where` says in messages where the values
    come from. Raises RaytrainError with one line: where, path, value, what is wrong.
    """
    data, source = recipe.model_dump(mode="json"), _Source(where)
    for path, value in values.items():
        data = source.replaced(data, _keys(path), value, f"{where}: {path} = {_shown(value)}")
    return _validated(data, source)


def dump_recipe(recipe: Recipe) -> str:
    """Return the recipe as YAML with every default written out; loading it gives it back."""
    data = recipe.model_dump(mode="json")
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, allow_unicode=True)


def recipe_differences(old: Recipe, new: Recipe) -> list[str]:
    """Return a text such as `schedule.lr[1].until: 10% -> 20%` for each value that differs."""
    return list(_differences((), old.model_dump(mode="json"), new.model_dump(mode="json")))


def _differences(keys: Keys, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences((*keys, key), old.get(key, "absent"), new.get(key, "absent"))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from _differences((*keys, index), *pair)
    elif old != new:
        before, after = (v if isinstance(v, str) else json.dumps(v) for v in (old, new))
        yield f"{_dotted(keys)}: {before} -> {after}"


def _shown(value: object) -> str:
    """Write a value for a message, cut off where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _dotted(keys: Keys) -> str:
    """Write keys as a user does: ("phases", 1, "batch") as phases[1].batch."""
    return "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in keys).lstrip(".")


def _find(path_or_builtin_name: str | Path) -> Path:
    path = Path(path_or_builtin_name)
    if path.is_file():
        return path
    if path.parent == Path() and path.name.removesuffix(".yaml") in builtin_recipes():
        return _BUILTIN_DIR / (path.name.removesuffix(".yaml") + ".yaml")
    raise RaytrainError(
        f"{path}: no such recipe; give a YAML file, or the name of one that comes with raytrain: "
        f"{', '.join(builtin_recipes())}"
    )


def _parse(text: str, name: str) -> tuple[Any, yaml.Node | None]:
    """Return the values of a YAML text and its nodes, which know their lines."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None, None
        _refuse_repeated_keys(root, name)
        return loader.construct_document(root), root
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise RaytrainError(f"{name}{line}: not valid YAML: {problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2018-99-99
        raise RaytrainError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error


def _refuse_repeated_keys(root: yaml.Node, name: str) -> None:
    todo: list[tuple[yaml.Node, Keys]] = [(root, ())]
    seen: set[int] = set()  # an alias may lead back to where it is used
    while todo:
        node, keys = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            todo += [(item, (*keys, index)) for index, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            lines: dict[int | str, int] = {}
            for key, value in node.value:
                line, here = key.start_mark.line + 1, (*keys, str(key.value))
                if here[-1] in lines and isinstance(key, yaml.ScalarNode):
                    raise RaytrainError(
                        f"{name}:{line}: {_dotted(here)}: given twice, first in line "
                        f"{lines[here[-1]]}; remove one"
                    )
                lines[here[-1]] = line
                todo.append((value, here))


@dataclass
class _Source:
    """Where the values of a recipe were written, to point at them."""

    name: str
    root: yaml.Node | None = None
    overrides: dict[Keys, str] = field(default_factory=dict)

    def replaced(self, data: Any, path: Keys, value: Any, text: str) -> Any:
        """Return `data` with the value at `path` replaced; `text` is how that was asked for."""
        self.overrides[path] = text
        return _replaced(data, path, value, text)

    def place(self, keys: Keys) -> str:
        """Return `--set a.b=c` or `file:line`, whichever the value of `keys` came from."""
        for path, text in reversed(self.overrides.items()):
            common = min(len(keys), len(path))
            if keys[:common] == path[:common]:
                return text
        return f"{self.name}:{self._line(self.root, keys)}" if self.root else self.name

    @staticmethod
    def _line(root: yaml.Node, keys: Keys) -> int:
        """Return the line of the deepest of `keys` that is written."""
        node, line = root, root.start_mark.line + 1
        for wanted in keys:
            children: dict[int | str, tuple[yaml.Node, yaml.Node]] = {}
            if isinstance(node, yaml.MappingNode):
                children = {key.value: (key, value) for key, value in node.value}
            elif isinstance(node, yaml.SequenceNode):
                children = {index: (item, item) for index, item in enumerate(node.value)}
            if wanted not in children:
                break
            key, node = children[wanted]
            line = key.start_mark.line + 1
        return line


def _build(data: Any, source: _Source, overrides: Sequence[str]) -> Recipe:
    if not isinstance(data, dict):
        raise RaytrainError(
            f"{source.name}: not a recipe: it needs keys such as model, phases and schedule"
        )
    for text in overrides:
        path, value = _parse_override(text)
        data = source.replaced(data, path, value, f"--set {text}")
    return _validated(data, source)


def _validated(data: Any, source: _Source) -> Recipe:
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        problems = _problems(error, data, source)
    more = len(problems) - _ERRORS_SHOWN
    rest = [f"and {more} more"] if more > 0 else []
    raise RaytrainError("; ".join(problems[:_ERRORS_SHOWN] + rest))


def _parse_override(text: str) -> tuple[Keys, Any]:
    path, equals, value = text.partition("=")
    keys = _keys(path)
    if not equals or "" in keys:
        raise RaytrainError(f"--set {text}: must be KEY=VALUE, such as phases.0.batch=64")
    try:
        parsed = yaml.load(value, _Loader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise RaytrainError(f"--set {text}: {value!r} is not a valid YAML value") from error
    return keys, parsed


def _keys(path: str) -> Keys:
    """Read `phases.1.batch` or `phases[1].batch` as ("phases", 1, "batch")."""
    keys = re.sub(r"\[(\d+)\]", r".\1", path.strip()).split(".")
    return tuple(int(key) if key.isdecimal() else key for key in keys)


def _replaced(data: Any, path: Keys, value: Any, what: str) -> Any:
    """Return `data` with the value at `path` replaced; containers off the path are shared."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(data, dict):
        return {**data, key: _replaced(data.get(key, {}), rest, value, what)}
    if isinstance(data, list | tuple) and isinstance(key, int):
        if key >= len(data):
            raise RaytrainError(f"{what}: there is no [{key}]: the list has {len(data)}")
        return [*data[:key], _replaced(data[key], rest, value, what), *data[key + 1 :]]
    raise RaytrainError(f"{what}: {_shown(data)} has no {_dotted(path)}; replace it as a whole")


def _problems(error: ValidationError, data: Any, source: _Source) -> list[str]:
    """Tell each fault in one line; unknown keys first, as other faults often follow from them."""
    faults = error.errors(include_url=False)
    faults.sort(key=lambda fault: fault["type"] != "extra_forbidden")
    lines: dict[Keys, str] = {}
    misspelt: set[Keys] = set()
    for fault in faults:
        keys, problem = _written(fault, data), _wording(fault)
        if fault["type"] == "extra_forbidden":
            known = _known_keys(keys[:-1])
            if close := difflib.get_close_matches(str(keys[-1]), known, n=1):
                misspelt.add((*keys[:-1], close[0]))
                problem = f"unknown key; did you mean {close[0]!r}?"
            else:
                problem = f"unknown key; known here: {', '.join(known)}"
        if keys not in misspelt:
            lines.setdefault(keys, f"{source.place(keys)}: {_dotted(keys)}: {problem}")
    return list(lines.values())


def _written(fault: ErrorDetails, data: Any) -> Keys:
    """Return the fault's keys as far as they are written: a curve may be a mere number."""
    keys = fault["loc"]
    if fault["type"] == "missing":
        return keys
    for depth, key in enumerate(keys):
        try:
            data = data[key]
        except (TypeError, LookupError):
            return keys[:depth]
    return keys


def _wording(fault: ErrorDetails) -> str:
    match fault["type"]:
        case "missing":
            return "missing; add it"
        case "value_error" | "curve":
            return fault["msg"].removeprefix("Value error, ")
        case "model_type" | "dict_type":
            wanted = "must be a section with keys"
        case "tuple_type":
            wanted = "must be a list"
        case _:
            wanted = fault["msg"].replace("Input should be", "must be")
            wanted = wanted.replace("Tuple should have", "must have")
            wanted = wanted.replace(" after validation", "")
    return f"{wanted}, is {_shown(fault['input'])}"


def _known_keys(keys: Keys) -> list[str]:
    """Return the keys that the section at `keys` may have."""
    kind: Any = Recipe
    for key in keys:
        kind = get_args(kind)[0] if isinstance(key, int) else kind.model_fields[key].annotation
        if isinstance(kind, type) and issubclass(kind, RootModel):
            kind = kind.model_fields["root"].annotation
    return list(kind.model_fields)
