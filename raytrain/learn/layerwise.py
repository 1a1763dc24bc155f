"""Optimizers for large batches, which scale each layer's step by a trust ratio.

The trust ratio sets the length of a layer's step by the length of its weights. Parameters of
fewer than two dimensions, that is norms' gains and all biases, have the ratio 1 (as in the
DAWNBench and MLPerf entries). All is done for many tensors at a time, nothing waits for the
device, and the change is made in the gradients' own memory, which halves the time on a CPU:
gradients are used up by a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Bounds = tuple[float, float]


class Lars(Optimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017, https://arxiv.org/abs/1708.03888).

    With gradient g, weights w, weight decay d and momentum m, for each layer::

        r <- eta |w| / (|g| + d |w|), within trust_ratio;  1 where |w| or |g| is 0
        u <- r (g + d w)
        v <- m v + u
        w <- w - lr v                 (with Nesterov: w - lr (u + m v))

    As with torch's SGD and unlike in the paper's algorithm, the learning rate is outside of the
    buffer v, so a change of lr acts at once on all of it; a change of m acts on the next sum.

    Args:
        groups: parameter groups.
        eta: the ratio where |w| = |g| and there is no decay.
        trust_ratio: least and most that r may be.
        nesterov: whether the momentum is Nesterov's.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        eta: float = 0.001,
        trust_ratio: Bounds | None = None,
        nesterov: bool = False,
    ) -> None:
        self._eta, self._bounds, self._nesterov = eta, trust_ratio, nesterov
        super().__init__(groups, {"lr": 0.0, "momentum": 0.9, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one step with the gradients there are."""
        del closure  # torch's signature; nothing here evaluates the model again
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            momentum, decay = group["momentum"], group["weight_decay"]
            grads: list[Tensor] = [p.grad for p in params]
            layers = [i for i, p in enumerate(params) if p.ndim >= 2]
            w, g = _norms([params[i] for i in layers]), _norms([grads[i] for i in layers])
            ratios = _bounded(self._eta * w / (g + decay * w), self._bounds, (w > 0) & (g > 0))
            torch._foreach_add_(grads, params, alpha=decay)
            _scale([grads[i] for i in layers], ratios)
            buffers = [self._buffer(p) for p in params]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, grads)
            if self._nesterov:
                torch._foreach_add_(grads, buffers, alpha=momentum)
            torch._foreach_add_(params, grads if self._nesterov else buffers, alpha=-group["lr"])

    def _buffer(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


class Lamb(Optimizer):
    """Layer-wise Adam (You et al. 2019, https://arxiv.org/abs/1904.00962, algorithm 2).

    With gradient g, weights w and weight decay d, for each layer::

        m <- b1 m + (1 - b1) g
        s <- b2 s + (1 - b2) g^2
        u <- m^ / (sqrt(s^) + eps) + d w
        r <- |w| / |u|, within trust_ratio;  1 where |w| or |u| is 0
        w <- w - lr r u

    m^ and s^ are m and s over the sum of the weights that their gradients have had, which is
    1 - (product of all b1 or b2 so far): Adam's correction, right for a changing b1 too.

    Args:
        groups: parameter groups. Their ``betas`` are (b1, b2).
        beta2: b2.
        eps: added to the root.
        trust_ratio: least and most that r may be.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        beta2: float = 0.999,
        eps: float = 1e-6,
        trust_ratio: Bounds | None = None,
    ) -> None:
        self._eps, self._bounds = eps, trust_ratio
        # the products of all betas so far are kept in the group, so in the checkpoint
        defaults = {"lr": 0.0, "betas": (0.9, beta2), "weight_decay": 0.0, "products": (1.0, 1.0)}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one step with the gradients there are."""
        del closure
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            updates = self._adam(params, group)
            if group["weight_decay"]:
                torch._foreach_add_(updates, params, alpha=group["weight_decay"])
            layers = [i for i, p in enumerate(params) if p.ndim >= 2]
            scaled = [updates[i] for i in layers]
            w, u = _norms([params[i] for i in layers]), _norms(scaled)
            _scale(scaled, _bounded(w / u, self._bounds, (w > 0) & (u > 0)))
            torch._foreach_add_(params, updates, alpha=-group["lr"])

    def _adam(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        (b1, b2), (p1, p2) = group["betas"], group["products"]
        group["products"] = p1, p2 = p1 * b1, p2 * b2
        for p in params:
            if not self.state[p]:
                self.state[p] = {"mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
        grads: list[Tensor] = [p.grad for p in params]  # type: ignore[misc]
        means = [self.state[p]["mean"] for p in params]
        squares = [self.state[p]["square"] for p in params]
        torch._foreach_lerp_(means, grads, 1 - b1)
        torch._foreach_mul_(squares, b2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - b2)
        torch._foreach_copy_(grads, squares)
        torch._foreach_sqrt_(grads)
        torch._foreach_div_(grads, (1 - p2) ** 0.5)
        torch._foreach_add_(grads, self._eps)
        torch._foreach_reciprocal_(grads)
        torch._foreach_mul_(grads, means)
        torch._foreach_div_(grads, 1 - p1)
        return grads


def _norms(tensors: list[Tensor]) -> Tensor:
    """The norm of each tensor; shape (number of tensors,)."""
    return torch.stack(torch._foreach_norm(tensors)) if tensors else torch.empty(0)


def _bounded(ratios: Tensor, bounds: Bounds | None, defined: Tensor) -> Tensor:
    """The ratios within bounds; 1 where they aren't defined."""
    return torch.where(defined, ratios if bounds is None else ratios.clamp(*bounds), 1.0)


def _scale(tensors: list[Tensor], factors: Tensor) -> None:
    """Multiply each tensor, in place, by its factor, which stays on the device."""
    if tensors:
        torch._foreach_mul_(tensors, factors.unbind())
