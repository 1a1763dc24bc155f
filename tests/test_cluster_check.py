"""`raytrain cluster check`: good files broken in one place each, and what is found there."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from raytrain.cli import app
from raytrain.errors import RaytrainError
from raytrain.orchestrate.cluster_check import check_cluster_file

CLUSTER = Path(__file__).parents[1] / "cluster"
BROKEN = yaml.safe_load((Path(__file__).parent / "broken_cluster_files.yaml").read_text())
AWS, GCP, LOCAL, KUBE = "aws-v100-16x8", "gcp-v100-16x8", "onprem", "raycluster"


def write(folder: Path, stem: str, text: str) -> Path:
    for name in CLUSTER.glob("constraints-*.txt"):
        shutil.copy(name, folder)
    path = folder / f"{stem}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def good(stem: str) -> str:
    return (CLUSTER / f"{stem}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("row", BROKEN, ids=lambda row: row["what"])
def test_what_is_broken_is_found(tmp_path: Path, row: dict[str, str]) -> None:
    text = good(row["file"])
    assert row["old"] in text, "the good file has changed: adapt this row"
    broken = text.replace(row["old"], row["new"], 1)
    found = check_cluster_file(write(tmp_path, row["file"], broken))
    assert any(row["says"] in f.text for f in found if f.key == row["key"]), found
    assert len(found) <= 4, "one fault, told as many"


def test_a_finding_has_its_line(tmp_path: Path) -> None:
    text = good(AWS).replace("min_workers: 2", "min_workers: 17", 1)
    found = check_cluster_file(write(tmp_path, AWS, text))
    (finding,) = [f for f in found if f.key.endswith("v100_spot.min_workers")]
    assert text.splitlines()[finding.line - 1] == "    min_workers: 17"


def test_a_missing_key_has_the_line_of_what_lacks_it(tmp_path: Path) -> None:
    text = good(AWS).replace("    max_workers: 16\n    priority: 1", "    priority: 1", 1)
    (finding,) = check_cluster_file(write(tmp_path, AWS, text))
    assert text.splitlines()[finding.line - 1] == "  v100_spot:"


def test_the_data_decides_how_large_a_disk_is_needed(tmp_path: Path) -> None:
    path = write(tmp_path, AWS, good(AWS).replace("VolumeSize: 500", "VolumeSize: 100"))
    assert check_cluster_file(path)
    assert not check_cluster_file(path, data_gb=10)


def test_the_command_line_says_file_line_key_and_fails(tmp_path: Path) -> None:
    broken = write(tmp_path, LOCAL, good(LOCAL).replace("max_workers: 2", "max_workers: 3"))
    done = CliRunner().invoke(app, ["cluster", "check", str(CLUSTER / "onprem.yaml"), str(broken)])
    assert done.exit_code == 1
    first, second = done.stdout.splitlines()
    assert first == f"{CLUSTER}/onprem.yaml: ok"
    line = good(LOCAL).splitlines().index("max_workers: 2 # as many as worker_ips") + 1
    assert second.startswith(f"{broken}:{line}: max_workers: 3 is above the 2 addresses")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\nb: 2", ":2: not YAML"),
        ("a: !!python/object/apply:os.system [date]", ":1: not YAML"),
        ("- a\n- b", "its top must be keys and values"),
        ("", "no cluster file"),
        ("phases: []", "`provider`"),
        ("apiVersion: v1\nkind: Pod", "no `kind: RayCluster`"),
    ],
)
def test_no_cluster_file_is_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RaytrainError) as caught:
        check_cluster_file(write(tmp_path, "x", text))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(RaytrainError, match="can't be read"):
        check_cluster_file(tmp_path / "absent.yaml")


@pytest.mark.parametrize("stem", [AWS, GCP, LOCAL, KUBE])
@pytest.mark.parametrize("value", [None, "x", ["x"], {"x": 1}], ids=str)
def test_no_value_makes_the_check_fall_over(tmp_path: Path, stem: str, value: Any) -> None:
    documents = list(yaml.safe_load_all(good(stem)))
    ways = list(ways_into(documents[0]))
    for number, way in enumerate(ways):
        if number % 7 != len(str(value)) % 7:  # each value at other places; all would take long
            continue
        changed = copy.deepcopy(documents)
        at = changed[0]
        for part in way[:-1]:
            at = at[part]
        at[way[-1]] = value
        path = write(tmp_path, stem, yaml.safe_dump_all(changed))
        try:
            check_cluster_file(path)
        except RaytrainError as error:
            assert "no cluster file" in str(error) or "RayCluster" in str(error), way  # noqa: PT017


def ways_into(value: Any) -> Iterator[tuple[Any, ...]]:
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in pairs:
        yield (key,)
        for way in ways_into(inner):
            yield (key, *way)
