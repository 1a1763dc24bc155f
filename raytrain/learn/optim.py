"""Optimizers by name, parameter groups, and the one function that writes hyperparameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain.learn.layerwise import Lamb, Lars
from raytrain.recipe.plan import Step
from raytrain.recipe.types import Optimizer as OptimizerSpec

ParamGroup = dict[str, Any]
OptimizerMaker = Callable[[list[ParamGroup]], Optimizer]


def build_optimizer(spec: OptimizerSpec, groups: list[ParamGroup]) -> Optimizer:
    """The optimizer that a recipe names. Its lr, momentum and weight decay come from the plan.

    ``sgd``, ``nag`` and ``lars`` keep torch's convention of the momentum buffer, ``v <- m v + g``
    and ``w <- w - lr v`` (for nag, ``w <- w - lr (g + m v)``; Sutskever et al. 2013): the learning
    rate is outside the buffer, so a change of lr acts at once on all of it, and a change of
    momentum acts on the next sum without rescaling what was gathered. g includes the weight decay.
    ``adamw`` (Loshchilov and Hutter 2017, https://arxiv.org/abs/1711.05101) is torch's, which
    corrects its bias with the beta1 of the step at hand.
    """
    match spec.name:
        case "lars":
            return Lars(groups, spec.eta, spec.trust_ratio, spec.nesterov)
        case "lamb":
            return Lamb(groups, spec.beta2, spec.eps or 1e-6, spec.trust_ratio)
        case "adamw":
            betas = (0.9, spec.beta2)
            return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=spec.eps or 1e-8)
    nesterov = spec.name == "nag"
    # torch refuses Nesterov with momentum 0; the plan sets the value before every step
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9, nesterov=nesterov)


def parameter_groups(model: nn.Module, spec: OptimizerSpec) -> list[ParamGroup]:
    """The model's parameters in at most two groups: those with weight decay and those without.

    Without are norms' gains and all biases, that is parameters of fewer than two dimensions,
    when ``decay_norm_and_bias`` is off (as in Goyal et al. 2017, section 5.1, for BatchNorm).
    """
    params = [p for p in model.parameters() if p.requires_grad]
    if spec.decay_norm_and_bias:
        return [{"params": params, "decays": True}]
    weights = [p for p in params if p.ndim >= 2]
    others = [p for p in params if p.ndim < 2]
    groups = [{"params": weights, "decays": True}, {"params": others, "decays": False}]
    return [group for group in groups if group["params"]]


def set_hyperparameters(optimizer: Optimizer, step: Step) -> None:
    """Write a step's learning rate, momentum and weight decay into an optimizer.

    For Adam's kin, momentum is beta_1. A group with ``decays: False`` keeps weight decay 0.
    """
    for group in optimizer.param_groups:
        group["lr"] = step.lr
        group["weight_decay"] = step.weight_decay if group.get("decays", True) else 0.0
        if "momentum" in group:
            group["momentum"] = step.momentum
        elif "betas" in group:
            group["betas"] = (step.momentum, group["betas"][1])


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """An optimizer's state dict with the names of parameters for their numbers.

    So it is the same for any grouping and sharding of them, and torch.distributed.checkpoint finds
    ``state.<parameter>.<key>``. The tensors are the live ones.
    """
    state, names = optimizer.state_dict(), _names(optimizer, model)
    groups = [g | {"params": [names[i] for i in g["params"]]} for g in state["param_groups"]]
    by_name = {names[i]: of_parameter for i, of_parameter in state["state"].items()}
    return {"state": by_name, "param_groups": groups}


def load_optimizer_state(optimizer: Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    """Load what ``optimizer_state`` gave, into the memory order of the parameters at hand."""
    numbers = {name: i for i, name in enumerate(_names(optimizer, model))}
    groups = [g | {"params": [numbers[n] for n in g["params"]]} for g in state["param_groups"]]
    by_number = {numbers[name]: of_parameter for name, of_parameter in state["state"].items()}
    optimizer.load_state_dict({"state": by_number, "param_groups": groups})
    for parameter, of_parameter in optimizer.state.items():
        for key, value in of_parameter.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                ordered = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                of_parameter[key] = ordered.copy_(value)


def _names(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Each parameter's name in the model, in the order of the optimizer's own numbers."""
    of = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [of.get(id(p), f"parameter-{i}") for i, p in enumerate(parameters)]
