"""What the README says, run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from raytrain.recipe.load import builtin_recipes, load_recipe
from raytrain.recipe.plan import Plan

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_worked_example_runs_as_a_script(drawn_set: Path, tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(# my_train\.py\n.*?)```", README, re.DOTALL)
    inline = script.replace("model=tiny_cnn,", 'model=tiny_cnn, engine="inline",')
    assert inline != script
    (tmp_path / "my_train.py").write_text(inline)
    (tmp_path / "photos.set").symlink_to(drawn_set)
    done = subprocess.run(
        [sys.executable, "my_train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    top1, images_per_s = map(float, done.stdout.splitlines()[-1].split())
    assert 0 <= top1 <= 1
    assert images_per_s > 0


def test_the_recipe_shown_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "shown.yaml").write_text(text)
    plan = Plan(load_recipe(tmp_path / "shown.yaml"), 1_281_167)
    assert plan.num_steps == 45 * 42


def test_every_recipe_loads_and_says_what_it_is() -> None:
    folder = Path(__file__).parents[1] / "raytrain" / "recipes"
    for name in builtin_recipes():
        assert Plan(load_recipe(name), 50_000).num_steps > 0
        header = (folder / f"{name}.yaml").read_text().split("\nmodel:")[0]
        for word in ("command:", "hardware:", "source:", "expected:"):
            assert f"# {word}" in header, (name, word)


def test_the_make_targets_and_options_exist() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    for target in re.findall(r"(?:^ {4}|`)make (\w[\w-]*)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
