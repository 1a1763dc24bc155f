"""What a cluster file's commands do: how Ray is started, what is installed, what they give away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from raytrain.orchestrate.cluster_file import Document, Finding, Key
from raytrain.orchestrate.cluster_known import LAST_TORCH_WITH_V100, RAY_IMAGE

SETUP: Final = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
)
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_HIDES_FAILURE: Final = (
    (re.compile(r"\|\|\s*(true|:|exit 0)(?=\s|;|\)|$)"), "`|| true` hides that it failed"),
    (re.compile(r";\s*(true|:|exit 0)\s*$"), "it always ends as if it had worked"),
    (re.compile(r"\bset \+e\b"), "`set +e` goes on after a failure"),
)
_SECRET: Final = re.compile(
    r"AKIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\w*(?:SECRET|TOKEN|PASSWORD|API_?KEY)\w*\s*[=:]\s*['\"]?[^\s$'\"~/]{8}",
    re.IGNORECASE,
)
_PIN: Final = re.compile(r"(?<![\w-])(ray|torch|raytrain)(?:\[[\w,-]+\])?==([\w.+!]+)")
_WHEEL: Final = re.compile(r"(?<![\w-])(raytrain)-(\d[\w.]*)-py3-none-any\.whl")
_CONSTRAINTS: Final = re.compile(r"[\w./~-]*constraints[\w.-]*\.txt")


def check_commands(document: Document) -> Iterator[Finding]:
    """Failures that are hidden; a dashboard that is open; authentication that is off."""
    for key, command in commands(document, *SETUP):
        for pattern, problem in _HIDES_FAILURE:
            if pattern.search(command):
                yield document.found(key, f"{problem}; let it fail, so that `ray up` stops")
        bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", command)
        if re.search(r"(?<!\|)\|(?!\|)", bare) and "pipefail" not in command:
            yield document.found(key, "a pipe hides that its first part failed; set -o pipefail")
        if re.search(r";\s*\S", bare) and not re.search(r"\bset -\w*e", command):
            yield document.found(key, "`;` goes on after a failure; write && or two commands")
    yield from _check_dashboard(document)
    yield from _check_authentication(document)


def check_secrets(document: Document) -> Iterator[Finding]:
    """Passwords, tokens and keys written into the file."""
    for key, text in document.strings():
        named = f"{key[-1]}: {text}" if key and key[0] == "provider" else text
        if _SECRET.search(named):
            yield document.found(
                key,
                "a secret in the file; mount it by file_mounts or let the machine's role give it",
            )


def check_versions(document: Document, path: Path) -> Iterator[Finding]:
    """Versions of raytrain, ray and torch: pinned, the same on all nodes, and fit for this one."""
    pins = list(_pins(document))
    for key, name in _constraints(document):
        file = path.parent / Path(name).name
        if not file.is_file():
            yield document.found(key, f"{name} isn't beside {path.name}; give one that is there")
            continue
        text = re.sub(r"#.*", "", file.read_text(encoding="utf-8"))
        pins += list(_pins_in(text, key, file.name))
    for package in ("ray", "raytrain", "torch"):
        of_package = [pin for pin in pins if pin.package == package]
        has_v100 = _has_v100(document)
        if not of_package and (package != "torch" or has_v100):
            pinned = f"{package}=={metadata.version(package)}"
            yield document.found(
                ("setup_commands",),
                f"no command pins {package}; install "
                + ("with constraints-v100.txt" if has_v100 else pinned),
            )
        for pin in of_package:
            problem = _problem(pin, of_package[0], has_v100)
            if problem:
                yield document.found(
                    pin.key, f"{pin.source} has {package} {pin.version}, {problem}"
                )


@dataclass(frozen=True)
class _Pin:
    package: str
    version: str
    key: Key
    source: str


def _problem(pin: _Pin, first: _Pin, has_v100: bool) -> str | None:
    """What is wrong with a pin, as the second half of a sentence."""
    try:
        version = Version(pin.version)
    except InvalidVersion:
        return "which is no version; mend it"
    if pin.version != first.version:
        return f"but {first.source} has {first.version}; all nodes need the same"
    if pin.package == "torch":
        if has_v100 and version.release[:2] > Version(LAST_TORCH_WITH_V100).release:
            return (
                "which has no kernels for V100 (sm_70); install with constraints-v100.txt "
                f"(torch {LAST_TORCH_WITH_V100})"
            )
        needed = next(
            requirement
            for requirement in map(Requirement, metadata.requires("raytrain") or ())
            if requirement.name == "torch"
        )
        return None if version in needed.specifier else f"but raytrain needs {needed}; install that"
    here = metadata.version(pin.package)
    return None if pin.version == here else f"but this machine has {here}; install the same"


def _check_dashboard(document: Document) -> Iterator[Finding]:
    key = ("head_start_ray_commands",)
    starts = [
        (where, command)
        for where, command in commands(document, *key)
        if re.search(r"\bray start\b.*--head\b", command)
    ]
    if not starts:
        yield document.found(
            key,
            "no `ray start --head`: Ray's own default opens the dashboard and the job server to "
            "every address; write it with --dashboard-host=127.0.0.1",
        )
    for where, command in starts:
        host = re.search(r"--dashboard-host[= ](\S+)", command)
        if host and host[1] not in _LOOPBACK:
            yield document.found(
                where,
                f"the dashboard and the job server listen on {host[1]}; write "
                "--dashboard-host=127.0.0.1 and reach them by `ray dashboard`",
            )


def _check_authentication(document: Document) -> Iterator[Finding]:
    set_to = [
        (key, mode[1])
        for key, text in document.strings()
        for mode in re.finditer(r"\bRAY_AUTH_MODE=['\"]?(\w+)", text)
    ]
    if not set_to:
        yield document.found(
            ("initialization_commands",),
            "nothing sets RAY_AUTH_MODE=token, so who reaches the head's ports runs code there; "
            "add it to ~/.bashrc as the files in cluster/ do",
        )
        return
    for key, mode in set_to:
        if mode != "token":
            yield document.found(key, f"RAY_AUTH_MODE={mode} is no authentication; write token")
    mounts = document.at(dict, "file_mounts") or {}
    by_path = any("RAY_AUTH_TOKEN_PATH=" in text for _, text in document.strings())
    if not by_path and not any(str(target).endswith("/.ray/auth_token") for target in mounts):
        yield document.found(
            ("file_mounts",),
            "no node gets the token; mount ~/.ray/auth_token (made by ray get-auth-token "
            "--generate) at .ray/auth_token of the nodes' home",
        )


def commands(document: Document, *groups: str) -> Iterator[tuple[Key, str]]:
    """The commands of these groups, also those of single node types, with their keys."""
    above: list[Key] = [()]
    above += [("available_node_types", n) for n in document.at(dict, "available_node_types") or {}]
    for key in above:
        for group in groups:
            for number, command in enumerate(document.at(list, *key, group) or []):
                yield (*key, group, number), command


def _pins(document: Document) -> Iterator[_Pin]:
    for key, text in document.strings():
        yield from _pins_in(text, key, "it")


def _pins_in(text: str, key: Key, source: str) -> Iterator[_Pin]:
    for pattern in (_PIN, _WHEEL, RAY_IMAGE):
        for match in pattern.finditer(text):
            yield _Pin(match[1], match[2], key, source)


def _constraints(document: Document) -> Iterator[tuple[Key, str]]:
    for key, command in commands(document, *SETUP):
        for match in _CONSTRAINTS.finditer(command):
            yield key, match[0]


def _has_v100(document: Document) -> bool:
    return any(re.search(r"^p3(dn)?\.|tesla-v100", text) for _, text in document.strings())
