"""A cluster file: YAML whose every key knows the line that it stands on."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from raytrain.errors import RaytrainError

Key = tuple[str | int, ...]
"""Way to a value: names of mappings and numbers in lists, from the top."""

_T = TypeVar("_T")
_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, order=True)
class Finding:
    """Something to mend.

    Attributes:
        line: in the file, from 1.
        key: way to the value, its parts joined by dots.
        text: what is wrong, and the mend.
    """

    line: int
    key: str
    text: str


@dataclass(frozen=True)
class Document:
    """One YAML document.

    Attributes:
        data: its content.
        lines: line of each key, from 1.
        repeated: keys that stand twice in one mapping, of which YAML keeps the last.
    """

    data: Mapping[str, Any]
    lines: Mapping[Key, int]
    repeated: tuple[Key, ...]

    def at(self, kind: type[_T], *key: str | int) -> _T | None:
        """The value at `key` if there is one and it is of this type."""
        value: Any = self.data
        for part in key:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return None
        return value if isinstance(value, kind) else None

    def found(self, key: Key, text: str) -> Finding:
        """A finding at `key`, or at the nearest key above it that the file has."""
        line = next(self.lines[key[:n]] for n in range(len(key), -1, -1) if key[:n] in self.lines)
        return Finding(line, ".".join(map(str, key)) or "(file)", text)

    def strings(self) -> Iterator[tuple[Key, str]]:
        """Every string in it."""
        yield from _strings(self.data, ())


def read_documents(path: Path) -> list[Document]:
    """Read a file of one or several YAML documents, each of them a mapping.

    Raises:
        RaytrainError: it can't be read, or isn't that.
    """
    try:
        text = path.read_text(encoding="utf-8")
        nodes = list(yaml.compose_all(text, yaml.SafeLoader))
        contents = list(yaml.safe_load_all(text))
    except OSError as error:
        raise RaytrainError(f"{path}: can't be read: {error.strerror}; check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise RaytrainError(f"{where}: not YAML: {problem}; mend that line") from error
    documents = [
        _document(node, content)
        for node, content in zip(nodes, contents, strict=True)
        if isinstance(content, dict)
    ]
    if not documents or len(documents) < sum(content is not None for content in contents):
        raise RaytrainError(f"{path}: no cluster file: its top must be keys and values")
    return documents


def check_known(document: Document, key: Key, known: Collection[str]) -> Iterator[Finding]:
    """Findings for the keys of the mapping at `key` that aren't `known` ones."""
    for name in document.at(dict, *key) or {}:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            mend = f"did you mean {close[0]}?" if close else "remove it"
            yield document.found((*key, str(name)), f"unknown key; {mend}")


def _document(node: yaml.Node, content: Mapping[str, Any]) -> Document:
    lines: dict[Key, int] = {(): node.start_mark.line + 1}
    repeated: list[Key] = []
    _walk(node, (), lines, repeated, set())
    return Document(content, lines, tuple(repeated))


def _walk(
    node: yaml.Node, key: Key, lines: dict[Key, int], repeated: list[Key], seen: set[int]
) -> None:
    """Note the lines below `node`; content behind an alias counts where it was written."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            lines[(*key, number)] = item.start_mark.line + 1
            _walk(item, (*key, number), lines, repeated, seen)
    elif isinstance(node, yaml.MappingNode):
        own = [(name, value) for name, value in node.value if name.tag != _MERGE]
        for name, value in own:
            inner = (*key, str(name.value))
            if inner in lines:
                repeated.append(inner)
            lines[inner] = name.start_mark.line + 1
            _walk(value, inner, lines, repeated, seen)
        for name, value in node.value:
            if name.tag == _MERGE:
                merged: dict[Key, int] = {}
                _walk(value, key, merged, repeated, seen)
                lines.update({k: line for k, line in merged.items() if k not in lines})


def _strings(value: Any, key: Key) -> Iterator[tuple[Key, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _strings(inner, (*key, str(name)))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _strings(inner, (*key, number))
