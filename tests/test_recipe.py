"""Recipes: YAML and --set in, YAML out, and one clear line for each mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from raytrain.errors import RaytrainError
from raytrain.recipe import (
    Curve,
    Recipe,
    builtin_recipes,
    dump_recipe,
    load_recipe,
    recipe_differences,
    recipe_from_dict,
)

TEXT = """\
model: {name: resnet50, args: {zero_init_residual: true, width: 2}}
phases:
  - {epochs: 12, image_px: 128, batch: 512, crop_area: [0.35, 1]}
  - epochs: 8
    image_px: 224
    batch: 256
schedule:
  lr:
    - {until: 10%, linear: [0.05, 8.5]}
    - {until: end, cosine: [8.5, 1e-3]}
  momentum: 0.9
  weight_decay: 5e-5
target: {top1: 0.75}
"""


def plain() -> dict[str, Any]:
    """Return a small recipe as plain values."""
    return {
        "model": {"name": "resnet18"},
        "phases": [{"epochs": 2, "image_px": 32, "batch": 8}],
        "schedule": {"lr": 0.1},
    }


def load_text(folder: Path, text: str, *overrides: str) -> Recipe:
    path = folder / "my.yaml"
    path.write_text(text)
    return load_recipe(path, overrides)


def the_error(folder: Path, text: str, *overrides: str) -> str:
    """Return the one line that a bad recipe is answered with, the folder left out."""
    with pytest.raises(RaytrainError) as caught:
        load_text(folder, text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{folder}/", "")


def test_yaml_becomes_a_recipe(tmp_path: Path) -> None:
    recipe = load_text(tmp_path, TEXT)
    assert recipe.num_epochs == 20
    assert recipe.model.args == {"zero_init_residual": True, "width": 2}
    assert recipe.phases[0].crop_area == (0.35, 1.0)
    assert recipe.phases[1].crop_area == (0.08, 1.0)
    assert recipe.schedule.lr.at(2, 20) == 8.5
    assert recipe.schedule.lr.at(20, 20) == 1e-3
    assert recipe.schedule.weight_decay == Curve.constant(5e-5)
    assert recipe.target.top1 == 0.75
    assert recipe.target.top5 is None


def test_defaults_are_those_of_the_readme() -> None:
    recipe = recipe_from_dict(plain())
    assert recipe.seed == 0
    assert recipe.optimizer.name == "nag"
    assert recipe.optimizer.decay_norm_and_bias
    assert recipe.schedule.momentum == Curve.constant(0.9)
    assert recipe.schedule.weight_decay == Curve.constant(0.0)
    assert recipe.precision.dtype == "fp32"
    assert recipe.validation.where == "beside"
    assert recipe.validation.clock == "counted"
    assert recipe.checkpoint.keep == 2


def test_dump_writes_every_default_and_loads_back(tmp_path: Path) -> None:
    recipe = load_text(tmp_path, TEXT)
    text = dump_recipe(recipe)
    assert load_text(tmp_path, text) == recipe
    for section in Recipe.model_fields:
        assert re.search(rf"^{section}:", text, re.MULTILINE)
    assert "linear: [0.05, 8.5]" in text
    assert "until: 10%" in text


@pytest.mark.parametrize("name", builtin_recipes())
def test_built_in_recipes_load_and_survive_a_dump(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert load_recipe(f"{name}.yaml") == recipe
    assert load_text(tmp_path, dump_recipe(recipe)) == recipe


@pytest.mark.parametrize("name", builtin_recipes())
def test_built_in_recipes_say_what_to_expect(name: str) -> None:
    folder = Path(__file__).parents[1] / "raytrain" / "recipes"
    header = (folder / f"{name}.yaml").read_text().split("model:")[0]
    for word in ("command:", "hardware:", "source:", "expected:"):
        assert word in header


def test_a_recipe_of_one_own_is_preferred_to_a_built_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digits.yaml").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    assert load_recipe("digits.yaml").model.name == "resnet50"
    assert load_recipe("digits").model.name != "resnet50"


@pytest.mark.parametrize("name", ["nothing", "nothing.yaml", "folder/digits", "/"])
def test_an_unknown_recipe_lists_the_known_ones(name: str) -> None:
    with pytest.raises(RaytrainError, match=r"no such recipe.*digits"):
        load_recipe(name)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "    batch: 256",
            "    bacth: 256",
            "my.yaml:6: phases[1].bacth: unknown key; did you mean 'batch'?",
        ),
        (
            "target:",
            "zebra:",
            "my.yaml:13: zebra: unknown key; known here: model, seed, phases, schedule, optimizer, "
            "loss, augment, normalize, precision, compile, ema, memory, validation, target, "
            "checkpoint, log, input, faults, resize",
        ),
        ("    batch: 256\n", "", "my.yaml:4: phases[1].batch: missing; add it"),
        ("224", "true", "my.yaml:5: phases[1].image_px: must be a valid integer, is True"),
        ("224", "224.0", "my.yaml:5: phases[1].image_px: must be a valid integer, is 224.0"),
        ("256", "'256'", "my.yaml:6: phases[1].batch: must be a valid integer, is '256'"),
        ("256", "0", "my.yaml:6: phases[1].batch: must be greater than 0, is 0"),
        (
            "[0.35, 1]",
            "[0.35, 0.1]",
            "my.yaml:3: phases[0].crop_area: the first number must not be above the second, is "
            "[0.35, 0.1]",
        ),
        (
            "[0.35, 1]",
            "[0.35, 1.5]",
            "my.yaml:3: phases[0].crop_area[1]: must be less than or equal to 1, is 1.5",
        ),
        (
            "until: end",
            "until: 18",
            "my.yaml:10: schedule.lr[1].until: the curve ends at epoch 18 but the run has 20 "
            "epochs; use `until: end` for the last piece",
        ),
        (
            "until: end",
            "until: 30",
            "my.yaml:10: schedule.lr[1].until: the curve goes on to epoch 30 but the run has 20 "
            "epochs; use `until: end` or a share such as 10%",
        ),
        (
            "cosine:",
            "cosin:",
            "my.yaml:10: schedule.lr[1].cosin: unknown key; did you mean 'cosine'?",
        ),
        ("0.9", "1", "my.yaml:11: schedule.momentum: must be >= 0 and < 1, is 1"),
        ("[0.05,", "[-0.05,", "my.yaml:9: schedule.lr[0].linear[0]: must be >= 0, is -0.05"),
        ("0.75", "75", "my.yaml:13: target.top1: must be less than or equal to 1, is 75"),
        ("{top1: 0.75}", "0.75", "my.yaml:13: target: must be a section with keys, is 0.75"),
        (
            "width: 2",
            "width: [2]",
            "my.yaml:1: model.args.width: must be a number, a text, true, false or null",
        ),
        ("target:", "schedule:", "my.yaml:13: schedule: given twice, first in line 7; remove one"),
        (
            "    batch: 256",
            "    epochs: 9",
            "my.yaml:6: phases[1].epochs: given twice, first in line 4; remove one",
        ),
    ],
)
def test_a_mistake_is_told_with_file_line_and_key(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    assert TEXT.count(old) >= 1
    assert the_error(tmp_path, TEXT.replace(old, new)) == message


def test_only_the_first_mistakes_are_told(tmp_path: Path) -> None:
    text = "model: {name: 1}\nphases: []\nschedule: {lr: -1}\nseed: x\nlog: 3\n"
    message = the_error(tmp_path, text)
    assert message.count("my.yaml:") == 3
    assert message.endswith("; and 1 more")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "my.yaml: not a recipe"),
        ("- 1", "my.yaml: not a recipe"),
        ("model: [1", "my.yaml:1: not valid YAML"),
        ("a: 1\nb: c: d", "my.yaml:2: not valid YAML"),
        ("seed: 2018-99-99", "my.yaml: not valid YAML"),
        ("seed: \x00", "my.yaml: not valid YAML"),
        ("? [1]\n: 2", "my.yaml:1: not valid YAML"),
        ("seed: !!python/object:os.system x", "my.yaml:1: not valid YAML"),
        ("seed: &a [*a]", "my.yaml:1: seed: must be a valid integer, is [[...]]"),
    ],
)
def test_a_file_that_is_no_recipe(text: str, message: str, tmp_path: Path) -> None:
    assert message in the_error(tmp_path, text)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "image.yaml"
    path.write_bytes(b"\xff\xd8\xff")
    with pytest.raises(RaytrainError, match="can't be read as text"):
        load_recipe(path)


def test_set_replaces_values(tmp_path: Path) -> None:
    recipe = load_text(
        tmp_path,
        TEXT,
        "phases.0.batch=64",
        "phases[1].batch=32",
        "schedule.lr=1e-3",
        "schedule.momentum=[{until: end, linear: [0.85, 0.95]}]",
        "target.top1=null",
        "validation.where=inline",
        "model.args.width=3",
    )
    assert [phase.batch for phase in recipe.phases] == [64, 32]
    assert recipe.schedule.lr == Curve.constant(1e-3)
    assert recipe.schedule.momentum.at(20, 20) == 0.95
    assert recipe.target.top1 is None
    assert recipe.validation.where == "inline"
    assert recipe.model.args["width"] == 3


def test_set_changes_neither_the_given_values_nor_an_aliased_phase(tmp_path: Path) -> None:
    values = plain()
    assert recipe_from_dict(values, ["phases.0.batch=9"]).phases[0].batch == 9
    assert values == plain()
    text = (
        "model: {name: m}\nschedule: {lr: 1}\nphases: [&p {epochs: 1, image_px: 8, batch: 4}, *p]\n"
    )
    recipe = load_text(tmp_path, text, "phases.0.batch=9")
    assert [phase.batch for phase in recipe.phases] == [9, 4]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("target.top1=1.5", "target.top1: must be less than or equal to 1, is 1.5"),
        ("trget.top1=0.5", "trget: unknown key; did you mean 'target'?"),
        ("phases.0.bach=3", "phases[0].bach: unknown key; did you mean 'batch'?"),
        ("phases.2.batch=3", "there is no [2]: the list has 2"),
        ("phases.0.crop_area=[0.9, 0.5]", "phases[0].crop_area: the first number must not be"),
        ("phases.0.crop_area.0=1.0", None),
        ("phases.1.crop_area.0=0.5", "phases[1].crop_area: must be a list"),
        ("schedule.momentum.0.constant=0.5", "0.9 has no [0].constant; replace it as a whole"),
        ("phases.0.batch", "must be KEY=VALUE, such as phases.0.batch=64"),
        ("=3", "must be KEY=VALUE"),
        ("seed=[1", "'[1' is not a valid YAML value"),
        ("seed=many", "seed: must be a valid integer, is 'many'"),
    ],
)
def test_a_mistake_in_set_names_it(override: str, message: str | None, tmp_path: Path) -> None:
    if message is None:
        assert load_text(tmp_path, TEXT, override).phases[0].crop_area == (1.0, 1.0)
    else:
        assert the_error(tmp_path, TEXT, override).startswith(f"--set {override}: {message}")


def test_plain_values_have_no_file_to_point_at() -> None:
    with pytest.raises(RaytrainError) as caught:
        recipe_from_dict({**plain(), "phases": []})
    assert str(caught.value) == "recipe: phases: must have at least one item"


@pytest.mark.parametrize("key", ["faults.standby", "checkpoint.memory_steps"])
def test_what_is_for_restarts_is_refused_with_steps(key: str) -> None:
    section, name = key.split(".")
    changed = plain() | {"faults": {"elastic": "step"}}
    changed |= {section: {**changed.get(section, {}), name: True if name == "standby" else 5}}
    with pytest.raises(RaytrainError, match=f"{key} is for faults.elastic: restart") as told:
        recipe_from_dict(changed)
    assert "\n" not in str(told.value)


def test_differences_name_keys_and_both_values(tmp_path: Path) -> None:
    old = load_text(tmp_path, TEXT)
    new = load_text(
        tmp_path,
        TEXT,
        "schedule.lr.0.until=20%",
        "schedule.momentum=[{until: end, cosine: [0.8, 0.9]}]",
        "phases.1.batch=128",
        "target.top1=null",
        "model.args={width: 2}",
    )
    assert recipe_differences(old, old) == []
    assert recipe_differences(old, new) == [
        "model.args.zero_init_residual: true -> absent",
        "phases[1].batch: 256 -> 128",
        "schedule.lr[0].until: 10% -> 20%",
        'schedule.momentum: 0.9 -> [{"until": "end", "cosine": [0.8, 0.9]}]',
        "target.top1: 0.75 -> null",
    ]


def test_a_recipe_can_not_be_changed() -> None:
    recipe = recipe_from_dict(plain())
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 3
