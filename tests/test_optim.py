"""Optimizers against formulae in float64, and the settings that belong to them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError
from raytrain.learn.models import small_cnn
from raytrain.learn.optim import (
    ParamGroup,
    build_optimizer,
    parameter_groups,
    set_hyperparameters,
)
from raytrain.recipe.load import load_recipe, recipe_from_dict
from raytrain.recipe.plan import Plan, Step
from raytrain.recipe.types import Optimizer, OptimizerName
from raytrain.train import Parts
from tests.workers import plain_cnn, train_with

Array = NDArray[np.float64]
Update = Callable[[Optimizer, Step, float, Array, Array, dict[str, Any]], Array]


class Tiny(nn.Module):
    """A convolution, a norm's gain, a bias and a linear layer, of very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.gain = nn.Parameter(torch.ones(4))
        self.linear = nn.Parameter(10 * torch.randn(5, 4))
        self.bias = nn.Parameter(torch.randn(5))


def sgd(spec: Optimizer, step: Step, decay: float, w: Array, g: Array, s: dict[str, Any]) -> Array:
    u = g + decay * w
    s["v"] = step.momentum * s.get("v", 0) + u
    change: Array = u + step.momentum * s["v"] if spec.name == "nag" else s["v"]
    return w - step.lr * change


def lars(spec: Optimizer, step: Step, decay: float, w: Array, g: Array, s: dict[str, Any]) -> Array:
    norm_w, norm_g = np.linalg.norm(w), np.linalg.norm(g)
    ratio = spec.eta * norm_w / (norm_g + decay * norm_w)
    if spec.trust_ratio is not None:
        ratio = np.clip(ratio, *spec.trust_ratio)
    u = (ratio if w.ndim > 1 else 1.0) * (g + decay * w)
    s["v"] = step.momentum * s.get("v", 0) + u
    change: Array = u + step.momentum * s["v"] if spec.nesterov else s["v"]
    return w - step.lr * change


def adam_direction(
    step: Step, beta2: float, eps: float, g: Array, s: dict[str, Any], kept: Array
) -> Array:
    s["m"] = step.momentum * s.get("m", 0) + (1 - step.momentum) * g
    s["s"] = beta2 * s.get("s", 0) + (1 - beta2) * g**2
    mean, square = s["m"] / (1 - kept[0]), s["s"] / (1 - kept[1])
    direction: Array = mean / (np.sqrt(square) + eps)
    return direction


def adamw(
    spec: Optimizer, step: Step, decay: float, w: Array, g: Array, s: dict[str, Any]
) -> Array:
    s["t"] = s.get("t", 0) + 1
    kept = np.array([step.momentum, spec.beta2]) ** s["t"]  # torch's correction
    u = adam_direction(step, spec.beta2, spec.eps or 1e-8, g, s, kept)
    return w - step.lr * (u + decay * w)


def lamb(spec: Optimizer, step: Step, decay: float, w: Array, g: Array, s: dict[str, Any]) -> Array:
    s["kept"] = s.get("kept", np.ones(2)) * [step.momentum, spec.beta2]
    u = adam_direction(step, spec.beta2, spec.eps or 1e-6, g, s, s["kept"]) + decay * w
    ratio = np.linalg.norm(w) / np.linalg.norm(u)
    if spec.trust_ratio is not None:
        ratio = np.clip(ratio, *spec.trust_ratio)
    return w - step.lr * (ratio if w.ndim > 1 else 1.0) * u


@pytest.mark.parametrize(
    ("spec", "update"),
    [
        (Optimizer(name="sgd"), sgd),
        (Optimizer(name="nag", decay_norm_and_bias=False), sgd),
        (Optimizer(name="lars"), lars),
        (Optimizer(name="lars", nesterov=True, decay_norm_and_bias=False, eta=0.02), lars),
        (Optimizer(name="lars", eta=0.1, trust_ratio=(0.3, 0.35)), lars),
        (Optimizer(name="adamw", beta2=0.99, eps=1e-3), adamw),
        (Optimizer(name="lamb", decay_norm_and_bias=False), lamb),
        (Optimizer(name="lamb", beta2=0.9, eps=1e-3, trust_ratio=(0.5, 4.0)), lamb),
    ],
    ids=lambda value: value.name if isinstance(value, Optimizer) else "",
)
def test_with_changing_hyperparameters_against_float64(spec: Optimizer, update: Update) -> None:
    torch.manual_seed(0)
    model = Tiny()
    optimizer = build_optimizer(spec, parameter_groups(model, spec))
    names = dict(model.named_parameters())
    weights = {name: p.detach().double().numpy() for name, p in names.items()}
    state: dict[str, dict[str, Any]] = {name: {} for name in names}
    plan = Plan(load_recipe("digits"), 1437)
    for s in range(0, plan.num_steps, 5):
        step = plan.step(s)
        set_hyperparameters(optimizer, step)
        for name, p in names.items():
            p.grad = torch.randn_like(p)
            decays = p.ndim > 1 or spec.decay_norm_and_bias
            decay = step.weight_decay if decays else 0.0
            gradient = p.grad.double().numpy()
            weights[name] = update(spec, step, decay, weights[name], gradient, state[name])
        optimizer.step()
    for name, p in names.items():
        np.testing.assert_allclose(p.detach().numpy(), weights[name], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_the_plan_is_followed_at_every_step(name: OptimizerName) -> None:
    spec = Optimizer(name=name, decay_norm_and_bias=False)
    optimizer = build_optimizer(spec, parameter_groups(small_cnn(10), spec))
    plan = Plan(load_recipe("digits"), 1437)
    for s in range(plan.num_steps):
        step = plan.step(s)
        set_hyperparameters(optimizer, step)
        weights, others = optimizer.param_groups
        for group in (weights, others):
            momentum = group["momentum"] if name == "lars" else group["betas"][0]
            assert (group["lr"], momentum) == (step.lr, step.momentum)
        assert (weights["weight_decay"], others["weight_decay"]) == (step.weight_decay, 0.0)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_layer_without_weights_or_gradients_has_ratio_one(name: OptimizerName) -> None:
    """Else a layer that starts at 0 would stay there."""
    zeros, still = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.ones(3, 2))
    spec = Optimizer(name=name)
    optimizer = build_optimizer(spec, [{"params": [zeros, still], "lr": 0.5}])
    zeros.grad, still.grad = torch.ones(3, 2), torch.zeros(3, 2)
    optimizer.step()
    assert torch.allclose(zeros, torch.full((3, 2), -0.5), rtol=1e-4)
    assert torch.equal(still, torch.ones(3, 2))


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_saved_and_loaded_it_goes_on_as_before(name: OptimizerName) -> None:
    spec = Optimizer(name=name)

    def steps(weight: nn.Parameter, optimizer: torch.optim.Optimizer, seeds: range) -> None:
        for seed in seeds:
            torch.manual_seed(seed)
            weight.grad = torch.randn(3, 2)
            optimizer.step()

    def fresh(start: torch.Tensor) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        weight = nn.Parameter(start.clone())
        return weight, build_optimizer(spec, [{"params": [weight], "lr": 0.1}])

    through, optimizer = fresh(torch.ones(3, 2))
    steps(through, optimizer, range(6))
    halfway, first = fresh(torch.ones(3, 2))
    steps(halfway, first, range(3))
    resumed, second = fresh(halfway.detach())
    second.load_state_dict(first.state_dict())
    steps(resumed, second, range(3, 6))
    assert torch.equal(resumed, through)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        ({"name": "nag", "eta": 0.01}, "optimizer: eta is a setting of lars, not of nag"),
        ({"name": "lamb", "nesterov": True}, "nesterov is a setting of lars, not of lamb"),
        ({"name": "sgd", "trust_ratio": [0, 1]}, "trust_ratio is a setting of lars and lamb"),
        ({"name": "lars", "beta2": 0.9}, "beta2 is a setting of adamw and lamb, not of lars"),
        ({"name": "lars", "trust_ratio": [2, 1]}, "must not be above the second"),
        ({"name": "lars", "clip_norm": 0}, "greater than 0"),
    ],
)
def test_a_setting_of_another_optimizer_is_a_mistake(
    optimizer: dict[str, object], says: str
) -> None:
    values = {
        "model": {"name": "any"},
        "phases": [{"epochs": 1, "image_px": 8, "batch": 8}],
        "schedule": {"lr": 0.1},
    }
    with pytest.raises(RaytrainError, match=says):
        recipe_from_dict(values | {"optimizer": optimizer})


def test_the_learning_rate_scales_with_each_phases_batch() -> None:
    values = {
        "model": {"name": "any"},
        "phases": [
            {"epochs": 1, "image_px": 8, "batch": 256},
            {"epochs": 1, "image_px": 8, "batch": 64},
        ],
        "schedule": {"lr": [{"until": "end", "linear": [0.4, 0.2]}], "lr_for_batch": 128},
    }
    plan = Plan(recipe_from_dict(values), 256)
    assert [plan.step(s).lr for s in range(5)] == pytest.approx(
        [0.8, 0.15, 0.1375, 0.125, 0.1125], rel=1e-12
    )


class Recording(torch.optim.SGD):
    """SGD that writes down, at each step, what its groups hold."""

    def __init__(self, groups: list[ParamGroup]) -> None:
        super().__init__(groups, lr=0.0, momentum=0.9, nesterov=True)
        self._file = Path(os.environ["RAYTRAIN_TEST_RECORD"]) / f"{os.getpid()}.jsonl"

    def step(self, closure: Any = None) -> Any:
        keys = ("lr", "momentum", "weight_decay", "decays")
        groups = [{key: group[key] for key in keys} for group in self.param_groups]
        with self._file.open("a") as file:
            file.write(json.dumps(groups) + "\n")
        return super().step(closure)


def recording(groups: list[ParamGroup]) -> torch.optim.Optimizer:
    return Recording(groups)


def test_what_the_optimizer_held_across_a_resume_with_other_workers(
    drawn_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_from_dict(
        {
            "model": {"name": "not.used:here"},
            "phases": [
                {"epochs": 1, "image_px": 16, "batch": 64},
                {"epochs": 1, "image_px": 16, "batch": 48},
            ],
            "schedule": {
                "lr": [
                    {"until": "30%", "linear": [0.01, 0.1]},
                    {"until": "end", "cosine": [0.1, 0]},
                ],
                "momentum": [{"until": "end", "linear": [0.95, 0.8]}],
                "weight_decay": [{"until": "end", "exponential": [1e-3, 1e-4]}],
            },
            "optimizer": {"decay_norm_and_bias": False},
            "checkpoint": {"every_steps": 4},
            "log": {"every_steps": 4},
        }
    )
    plan = Plan(recipe, ShardSet.open(drawn_set).num_images("train"))
    parts = Parts(model=plain_cnn, optimizer=recording)

    def held(workers: int, stop_after: int | None) -> Iterator[tuple[Any, ...]]:
        """Each step's groups, of all workers."""
        folder = tmp_path / f"{workers}"
        folder.mkdir()
        monkeypatch.setenv("RAYTRAIN_TEST_RECORD", str(folder))
        train_with(workers, recipe, drawn_set, tmp_path / "run", stop_after, parts)
        return zip(*map(json_lines, sorted(folder.iterdir())), strict=True)

    seen = [*held(2, stop_after=4), *held(1, stop_after=None)]
    assert len(seen) == plan.num_steps
    for step, workers in zip(map(plan.step, range(plan.num_steps)), seen, strict=True):
        for group, decays in ((g, g["decays"]) for groups in workers for g in groups):
            assert group["lr"] == step.lr
            assert group["momentum"] == step.momentum
            assert group["weight_decay"] == (step.weight_decay if decays else 0.0)


def json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]
