from __future__ import annotations

import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.io import ImageReadMode, decode_jpeg

from raytrain.errors import RaytrainError
from raytrain.learn.loss import build_loss, count_correct, loss_sum
from raytrain.learn.models import build_model, small_cnn, small_resnet, whitened_cnn
from raytrain.learn.optim import build_optimizer, parameter_groups, set_hyperparameters
from raytrain.learn.precision import Normalizer
from raytrain.recipe.load import load_recipe
from raytrain.recipe.plan import Plan
from raytrain.recipe.types import Loss, Model, Optimizer, OptimizerName


@pytest.mark.parametrize("name", ["sgd", "nag", "adamw"])
def test_the_optimizer_holds_what_the_plan_says_at_every_step(name: OptimizerName) -> None:
    spec = Optimizer(name=name, decay_norm_and_bias=False)
    optimizer = build_optimizer(spec, parameter_groups(small_cnn(10), spec))
    plan = Plan(load_recipe("digits"), 1437)
    for s in range(plan.num_steps):
        step = plan.step(s)
        set_hyperparameters(optimizer, step)
        weights, others = optimizer.param_groups
        for group in (weights, others):
            assert group["lr"] == step.lr
            momentum = group["betas"][0] if name == "adamw" else group["momentum"]
            assert momentum == step.momentum
        assert weights["weight_decay"] == step.weight_decay > 0
        assert others["weight_decay"] == 0.0


def test_nag_with_changing_momentum_against_a_float64_reference() -> None:
    """v <- m v + g + d w; w <- w - lr (g + d w + m v), with m and lr new at each step."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(7))
    spec = Optimizer(name="nag")
    optimizer = build_optimizer(spec, [{"params": [weight], "decays": True}])
    w, v = weight.detach().double().clone(), torch.zeros(7, dtype=torch.float64)
    plan = Plan(load_recipe("digits"), 1437)
    for s in range(0, plan.num_steps, 5):
        step = plan.step(s)
        gradient = torch.randn(7)
        weight.grad = gradient.clone()
        set_hyperparameters(optimizer, step)
        optimizer.step()
        g = gradient.double() + step.weight_decay * w
        v = step.momentum * v + g
        w = w - step.lr * (g + step.momentum * v)
    assert torch.allclose(weight.detach().double(), w, rtol=1e-5, atol=1e-6)


def test_norms_and_biases_are_apart_only_when_asked() -> None:
    model = small_cnn(10)
    together = parameter_groups(model, Optimizer())
    apart = parameter_groups(model, Optimizer(decay_norm_and_bias=False))
    assert [group["decays"] for group in together] == [True]
    assert [group["decays"] for group in apart] == [True, False]
    assert all(p.ndim == 1 for p in apart[1]["params"])
    assert sum(len(g["params"]) for g in apart) == len(together[0]["params"])


def test_loss_sum_takes_means_and_single_losses() -> None:
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    single = loss_sum(build_loss(Loss(label_smoothing=0.1)), logits, labels)
    mean = loss_sum(nn.CrossEntropyLoss(label_smoothing=0.1), logits, labels)
    assert single.item() == pytest.approx(mean.item(), rel=1e-6)
    with pytest.raises(RaytrainError, match="gave shape"):
        loss_sum(lambda logits, _labels: logits, logits, labels)


def test_top_k_with_fewer_classes_than_k() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
    labels = torch.tensor([1, 0])
    assert count_correct(logits, labels, 1).item() == 0
    assert count_correct(logits, labels, 5).item() == 2


def test_pixels_become_the_models_input() -> None:
    normalize = Normalizer((0.5, 0.25, 0.0), (0.25, 0.5, 1.0), "cpu", channels_last=False)
    pixels = torch.tensor([[[[255, 0, 51]]]], dtype=torch.uint8)
    assert normalize(pixels).flatten().tolist() == pytest.approx([2.0, -0.5, 0.2])
    assert normalize(pixels).shape == (1, 3, 1, 1)


@pytest.mark.parametrize("name", ["resnet18", "timm:resnet18", "tests.workers:plain_cnn"])
def test_models_by_name(name: str) -> None:
    model = build_model(Model(name=name), 7)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 7)


@pytest.mark.parametrize("px", [24, 33, 96])
def test_small_models_take_any_image_size(px: int) -> None:
    for model in (small_cnn(5), small_resnet(5), whitened_cnn(5)):
        assert model(torch.randn(2, 3, px, px)).shape == (2, 5)


def test_whitening_takes_away_what_neighbouring_pixels_share() -> None:
    """On real images, of which the net's fixed filters know nothing."""
    archive = Path(__file__).parents[2] / "shared" / "data" / "tiny-imagenet-10.tar"
    if not archive.exists():
        pytest.skip(f"no {archive}")
    whitening = next(whitened_cnn(10).children())
    pixels = torch.stack(list(islice(_images(archive), 1000)))[::5]
    pixels = nn.functional.avg_pool2d(pixels, 2) / 58  # to a variance near 1
    with torch.no_grad():
        white = whitening(pixels)
    assert torch.equal(white[:, :12], -white[:, 12:])
    assert _likeness(nn.functional.unfold(pixels, 2)) > 0.6
    assert _likeness(white[:, :12].flatten(2)) < 0.05
    spread = white[:, :12].std((0, 2, 3))
    assert spread.min() > 0.5
    assert spread.max() < 1.01


def _images(archive: Path) -> Iterator[Tensor]:
    """Pixels of an archive's JPEG files, (3, h, w), from 0 to 255."""
    with tarfile.open(archive) as files:
        for member in files:
            if member.name.endswith(".JPEG"):
                data = files.extractfile(member).read()  # type: ignore[union-attr]
                jpeg = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                yield decode_jpeg(jpeg, ImageReadMode.RGB).float()


def _likeness(channels: Tensor) -> float:
    """Mean correlation between the channels, shape (n, c, places), without sign."""
    between = torch.corrcoef(channels.transpose(0, 1).flatten(1)).abs()
    count = len(between)
    return float((between.sum() - count) / (count * (count - 1)))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (Model(name="resnet5O"), "torchvision has no model 'resnet5O'; did you mean resnet50"),
        (Model(name="timm:resnet5O"), "timm has no model 'resnet5O'"),
        (Model(name="no_such_module:f"), "can't import no_such_module"),
        (Model(name="tests.workers:plain_cn"), "did you mean plain_cnn"),
        (Model(name="resnet18", args={"widht": 3}), "can't be called with num_classes, widht"),
        (Model(name="raytrain.data.order:BlockLayout"), "can't be called"),
    ],
)
def test_unknown_models(spec: Model, says: str) -> None:
    with pytest.raises(RaytrainError, match=says.replace("?", r"\?")) as told:
        build_model(spec, 10)
    assert "\n" not in str(told.value)
