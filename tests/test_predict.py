"""`raytrain plan`: the model against five public runs, its arithmetic, and its command."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from raytrain.cli import app
from raytrain.errors import RaytrainError
from raytrain.predict.cluster import read_cluster
from raytrain.predict.constants import IMAGENET_IMAGES, MACHINES, SOFTWARE, Machine
from raytrain.predict.decode import MEASURED, DecodeCost, stored_px
from raytrain.predict.model import Forecast, Site, forecast, forecasts
from raytrain.predict.quote import Request, quote
from raytrain.predict.show import counts_shown, told
from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.plan import Plan
from raytrain.recipe.types import Recipe
from tests import dawnbench_runs
from tests.dawnbench_runs import FOLDER, RUNS, XLA_RUNS

CLUSTERS = Path(__file__).parents[1] / "cluster"
AWS = CLUSTERS / "aws-v100-16x8.yaml"
P3 = MACHINES["p3.16xlarge"]

needs_public_runs = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"the public DAWNBench runs aren't there: {FOLDER}"
)


def recipe(*phases: tuple[int, int, int], **sections: Any) -> Recipe:
    """ResNet-50 with phases of (epochs, image px, batch)."""
    return recipe_from_dict(
        {
            "model": {"name": "resnet50"},
            "phases": [{"epochs": e, "image_px": px, "batch": b} for e, px, b in phases],
            "schedule": {"lr": 1.0},
            "precision": {"dtype": "fp16", "channels_last": True},
            **sections,
        }
    )


def run(
    plan: Recipe, nodes: int = 1, machine: Machine = P3, software: str = "raytrain"
) -> Forecast:
    site = Site(machine, SOFTWARE[software], MEASURED)
    return forecast(Plan(plan, IMAGENET_IMAGES), site, nodes)


# --- against public runs


@needs_public_runs
@pytest.mark.parametrize("name", RUNS)
def test_public_run_is_reproduced_within_10_percent(name: str) -> None:
    rows = dawnbench_runs.compare(name)
    judged = [row for row in rows if row.is_counted or row.image_px is None]
    assert len(judged) >= 4
    assert {(row.image_px, row.batch): row.error for row in judged if abs(row.error) > 0.1} == {}


@needs_public_runs
@pytest.mark.parametrize("name", XLA_RUNS)
def test_run_is_predicted_from_the_other_runs_of_its_software(name: str) -> None:
    rows = dawnbench_runs.left_out(name)
    judged = [row for row in rows if row.is_counted or row.image_px is None]
    assert {(row.image_px, row.batch): row.error for row in judged if abs(row.error) > 0.1} == {}


@needs_public_runs
def test_constants_are_what_fits() -> None:
    xla, moxing, fastai = (SOFTWARE[n] for n in ("aiacc-2020", "moxing-2018", "fastai-2018"))
    fits = dawnbench_runs.fit(dawnbench_runs.xla_sites, (20, 1200, 10), XLA_RUNS)
    constants = (P3.gpu.pass_ms, xla.images_per_s["V100"], xla.coordination_ms)
    assert fits == pytest.approx(constants, rel=0.02)
    fits = dawnbench_runs.fit(dawnbench_runs.moxing_2018_sites, (800, 10), ["MoXing 2018 16x8"])
    assert fits == pytest.approx((moxing.images_per_s["V100"], moxing.most_gbit_s), rel=0.02)
    fits = dawnbench_runs.fit(dawnbench_runs.fastai_sites, (50, 10), ["fast.ai 16x8"])
    assert fits == pytest.approx((P3.hop_us, fastai.pause_s), rel=0.02)


# --- the arithmetic


@pytest.mark.parametrize("software", SOFTWARE)
def test_table_speed_comes_out_again(software: str) -> None:
    """ResNet-50 v1.5 at 224 px with 256 images on one GPU, where all its time is the GPU's."""
    one = replace(P3, gpus=1, gpu_memory_gb=32)
    step = run(recipe((1, 224, 256)), machine=one, software=software).phases[0].step
    macs = SOFTWARE[software].resnet50.gmacs / SOFTWARE["raytrain"].resnet50.gmacs
    images_seconds = 256 / SOFTWARE[software].images_per_s["V100"] - 0.0232
    assert step.gpu == pytest.approx(0.0232 + macs * images_seconds, rel=1e-3)
    assert step.exchange == step.exposed == 0


def test_images_cost_by_their_pixels_and_passes_by_their_number() -> None:
    made = run(recipe((1, 112, 1024), (1, 224, 1024), (1, 224, 4096)))
    small, large, three = (phase.step.gpu for phase in made.phases)
    assert [phase.passes for phase in made.phases] == [1, 1, 3]  # about 226 fit
    assert [phase.images_per_gpu for phase in made.phases] == [128, 128, 512]
    assert large - 0.0232 == pytest.approx(4 * (small - 0.0232))
    assert three - 3 * 0.0232 == pytest.approx(4 * (large - 0.0232))


def test_exchange_is_a_ring_in_buckets_behind_the_backward_pass() -> None:
    made = run(recipe((1, 128, 16384), (1, 288, 16384)), nodes=16)
    short, long = (phase.step for phase in made.phases)
    wire = 2 * 15 / 16 * 25.56e6 * 4 / (0.9 * 25e9 / 8)
    hops = 4 * 30 * P3.hop_us / 1e6  # 102 MB are four buckets of 25 MiB
    assert short.exchange == long.exchange == pytest.approx(wire + hops)
    assert short.exposed == pytest.approx(max(wire + hops - 2 / 3 * short.gpu, (wire + hops) / 4))
    assert long.exposed == pytest.approx((wire + hops) / 4)


def test_exchange_that_takes_longer_than_the_gpu_binds() -> None:
    slow = replace(P3, gbit_s=2.5)
    assert run(recipe((1, 128, 16384)), 16, slow).phases[0].step.limit == "exchange"


def test_few_cores_bind_unless_images_are_synthetic() -> None:
    weak = replace(P3, vcpus=2)
    phase = run(recipe((1, 128, 1024)), machine=weak).phases[0]
    assert phase.step.limit == "decode"
    area = 4 / 3 * 160**2
    core_seconds = (4.84 * area + 0.93 * 128**2) / 1e9 / 0.78
    assert phase.epoch_seconds == pytest.approx(IMAGENET_IMAGES * core_seconds, rel=0.01)
    synthetic = run(recipe((1, 128, 1024), input={"decoder": "synthetic"}), machine=weak)
    assert synthetic.phases[0].step.limit == "GPU"


def test_slow_storage_binds_only_until_a_node_has_read_all() -> None:
    slow = replace(P3, storage_mb_s=50)
    alone = run(recipe((3, 128, 1024), (1, 128, 2048)), machine=slow)
    first, second = alone.phases
    reading = IMAGENET_IMAGES * 14_350 / 50e6
    assert first.step.limit == "GPU"
    assert first.epoch_seconds + first.cold == pytest.approx(reading, rel=0.01)
    assert second.cold == 0  # the same stored size
    many = run(recipe((3, 128, 8192)), nodes=4, machine=slow)
    assert many.phases[0].step.limit == "storage"  # (3/4)^2 of it are still new in the last epoch


def test_one_epoch_more_costs_an_epoch() -> None:
    shorter, longer = (run(recipe((epochs, 224, 8192)), nodes=2) for epochs in (3, 4))
    phase = shorter.phases[0]
    more = longer.seconds - shorter.seconds
    assert more == pytest.approx(phase.epoch_seconds + phase.validation)


def test_validation_is_counted_as_often_as_it_is_made() -> None:
    often, seldom = (
        run(recipe((6, 224, 1024), validation={"every_epochs": every})).phases[0]
        for every in (1, 3)
    )
    assert (often.validations, seldom.validations) == (6, 2)
    assert often.validation > 0
    assert often.seconds - seldom.seconds == pytest.approx(4 * often.validation)
    public = run(recipe((6, 224, 1024)), software="aiacc-2020").phases[0]
    assert public.validation == 0  # outside the clock of that entry


def test_fp32_is_slower_and_halves_what_fits() -> None:
    mixed, full = (
        run(recipe((1, 224, 1600), precision={"dtype": dtype})).phases[0]
        for dtype in ("fp16", "fp32")
    )
    assert (mixed.passes, full.passes) == (1, 2)
    assert full.step.gpu > 2.5 * mixed.step.gpu


def test_more_nodes_are_faster_and_cost_more() -> None:
    made = forecasts(
        Plan(recipe((2, 128, 8192)), IMAGENET_IMAGES), Site(P3, SOFTWARE["raytrain"], MEASURED), 8
    )
    times = [made[n].seconds for n in (1, 2, 4, 8)]
    hours = [made[n].node_hours for n in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert hours == sorted(hours)


def test_nodes_without_images_are_refused_or_left_out() -> None:
    plan = Plan(recipe((1, 128, 20)), 100)
    site = Site(P3, SOFTWARE["raytrain"], MEASURED)
    with pytest.raises(RaytrainError, match=r"3 nodes have 24 GPUs, but a step has 20 images"):
        forecast(plan, site, 3)
    assert list(forecasts(plan, site, 16)) == [1, 2]


@pytest.mark.parametrize(
    ("change", "software", "machine", "message"),
    [
        ({"model": {"name": "timm:vit"}}, "raytrain", "p3.16xlarge", "model.name: timm:vit"),
        ({"precision": {"dtype": "bf16"}}, "raytrain", "p3.16xlarge", "dtype: V100 lacks bf16"),
        ({}, "moxing-2018", "p4d.24xlarge", "known on V100 only, not on A100"),
    ],
)
def test_what_has_no_figures_is_refused(
    change: dict[str, Any], software: str, machine: str, message: str
) -> None:
    with pytest.raises(RaytrainError, match=message):
        run(recipe((1, 128, 1024), **change), 1, MACHINES[machine], software)


# --- decode cost


def test_stored_sizes_are_those_that_training_reads() -> None:
    assert {px: stored_px(px) for px in (96, 128, 160, 224, 288, 384)} == {
        96: 160, 128: 160, 160: 256, 224: 256, 288: 352, 384: 352,
    }  # fmt: skip


def bench_file(path: Path, cost: DecodeCost) -> Path:
    """What `raytrain bench input --json` would write on a machine with that cost."""

    def row(what: str, size: object, px: int | None, rate: float) -> dict[str, Any]:
        case = {"what": what, "size": str(size), "image_px": px}
        return {"case": case, "images_per_s": {"median": rate, "low": rate, "high": rate}}

    rows = [row("torchvision", 160, 128, 1.0), row("raytrain cpu", "original", 128, 2.0)]
    for size, px in ((160, 96), (160, 128), (256, 224)):
        area = 4 / 3 * size**2
        seconds = (cost.ns_per_stored_pixel * area + cost.ns_per_crop_pixel * px**2) / 1e9
        rows.append(row("raytrain cpu", size, px, 1 / seconds))
    path.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    return path


def test_users_own_bench_decides(tmp_path: Path) -> None:
    slow = DecodeCost(ns_per_stored_pixel=500.0, ns_per_crop_pixel=90.0)
    file = bench_file(tmp_path / "bench.json", slow)
    found = DecodeCost.read(file)
    assert found.ns_per_stored_pixel == pytest.approx(500)
    assert found.ns_per_crop_pixel == pytest.approx(90)
    made = quote(recipe((1, 128, 16384)), Request(AWS, bench=file, nodes=1))
    assert made.chosen.phases[0].step.limit == "decode"


@pytest.mark.parametrize("text", ["{", "{}", '{"rows": [1]}', '{"rows": []}'])
def test_bench_file_that_is_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bench.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(RaytrainError, match=r"bench\.json: "):
        DecodeCost.read(file)


# --- cluster files


@pytest.mark.parametrize(
    ("file", "machine", "nodes"),
    [
        ("aws-v100-16x8.yaml", "p3.16xlarge", 16),
        ("gcp-v100-16x8.yaml", "n1-standard-96+8xV100", 16),
        ("aws-h100-8.yaml", "p5.48xlarge", 1),
    ],
)
def test_our_cluster_files(file: str, machine: str, nodes: int) -> None:
    found = read_cluster(CLUSTERS / file)
    assert (found.machine_name, found.most_nodes) == (machine, nodes)


@pytest.mark.parametrize(("file", "nodes"), [("onprem.yaml", 2), ("raycluster.yaml", 16)])
def test_files_that_name_no_machine(file: str, nodes: int) -> None:
    with pytest.raises(RaytrainError, match=rf"{file}:\d+: says no type of machine; give --mach"):
        read_cluster(CLUSTERS / file)
    assert read_cluster(CLUSTERS / file, "modelarts-8xV100").most_nodes == nodes


def aws_file(path: Path, **machines: str) -> Path:
    types = {
        name: {"max_workers": 4, "resources": {}, "node_config": {"InstanceType": machine}}
        for name, machine in machines.items()
    }
    content = {"provider": {"type": "aws"}, "max_workers": 8, "available_node_types": types}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_cluster_file_of_several_or_no_kinds(tmp_path: Path) -> None:
    mixed = aws_file(tmp_path / "mixed.yaml", a="p3.16xlarge", b="p4d.24xlarge", c="m5.large")
    with pytest.raises(RaytrainError, match=r"\(p3.16xlarge, p4d.24xlarge\); choose: --machine"):
        read_cluster(mixed)
    assert read_cluster(mixed, "p4d.24xlarge").machine_name == "p4d.24xlarge"
    with pytest.raises(RaytrainError, match=r"cpus.yaml: no nodes with GPUs"):
        read_cluster(aws_file(tmp_path / "cpus.yaml", c="m5.large"))
    with pytest.raises(RaytrainError, match=r"did you mean p3.16xlarge\?"):
        read_cluster(mixed, "p3.16xlarg")


# --- the question and its answer


def test_cheapest_number_of_nodes_that_makes_it() -> None:
    made = quote(recipe((21, 128, 28672), (21, 224, 28672)), Request(AWS, target_minutes=20))
    in_time = {n: each for n, each in made.runs.items() if each.seconds <= 1200}
    assert 1 < min(in_time) < 16
    assert made.in_time
    assert made.chosen.node_hours == min(each.node_hours for each in in_time.values())


def test_target_out_of_reach_tells_the_fastest() -> None:
    made = quote(recipe((21, 128, 28672)), Request(AWS, target_minutes=0.5))
    assert not made.in_time
    assert made.chosen.seconds == min(each.seconds for each in made.runs.values())


def test_price_is_the_users_or_the_tables() -> None:
    plan = recipe((1, 128, 16384))
    listed, given = (quote(plan, Request(AWS, usd_per_node_hour=p)) for p in (None, 10.0))
    assert given.cost(given.chosen) == pytest.approx(16 * 10 * given.chosen.seconds / 3600)
    assert listed.usd_per_node_hour == P3.usd_per_hour
    unknown = quote(plan, Request(AWS, machine="modelarts-8xV100"))
    assert unknown.cost(unknown.chosen) is None


def test_what_does_not_fit_is_told() -> None:
    made = quote(recipe((1, 224, 32768)), Request(AWS, nodes=4))
    assert any("phase 0 1,001 > 226" in note for note in made.notes())
    said = recipe((1, 224, 32768), memory={"images_per_pass": 128})
    made = quote(said, Request(AWS, nodes=4))
    assert made.chosen.phases[0].passes == 8
    assert not any("fit" in note for note in made.notes())


def test_chosen_number_of_nodes_is_always_shown() -> None:
    plan = recipe((1, 128, 65536))
    assert counts_shown(quote(plan, Request(AWS))) == [1, 2, 4, 8, 16]
    assert counts_shown(quote(plan, Request(AWS, nodes=11))) == [1, 2, 4, 8, 11, 16]
    assert counts_shown(quote(plan, Request(AWS, nodes=300))) == [8, 16, 32, 64, 128, 256, 300]


def test_unknown_software_and_two_ways_to_choose_nodes() -> None:
    plan = recipe((1, 128, 1024))
    with pytest.raises(RaytrainError, match=r"--software: moxing isn't known; did you mean moxing"):
        quote(plan, Request(AWS, software="moxing"))
    with pytest.raises(RaytrainError, match="give one"):
        quote(plan, Request(AWS, nodes=2, target_minutes=5))


# --- the command


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "record.yaml"
    phases = [
        {"epochs": 21, "image_px": 128, "batch": 28672},
        {"epochs": 21, "image_px": 224, "batch": 28672},
        {"epochs": 2, "image_px": 288, "batch": 16384},
    ]
    content = {
        "model": {"name": "resnet50"},
        "phases": phases,
        "schedule": {"lr": 1.0},
        "precision": {"dtype": "fp16", "channels_last": True},
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_command_fits_80_columns_and_draws(recipe_file: Path, tmp_path: Path) -> None:
    png = tmp_path / "plan.png"
    command = ["plan", str(recipe_file), "--cluster", str(AWS), "--png", str(png)]
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, command)
    assert shown.exit_code == 0
    assert "128 V100" in shown.output
    assert "…" not in shown.output
    assert max(map(len, shown.output.replace(str(png), "").splitlines())) <= 80
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("minutes", "status"), [(30, 0), (1, 3)])
def test_command_tells_by_its_exit_status_whether_the_target_is_made(
    recipe_file: Path, minutes: int, status: int
) -> None:
    command = ["plan", str(recipe_file), "--cluster", str(AWS), "--target-minutes", str(minutes)]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == status
    assert ("the cheapest is" in shown.output) == (status == 0)


def test_prediction_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys, raytrain.predict.show\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_table_of_many_nodes_is_cut_nowhere() -> None:
    phases = [(2, 96, 131_072), (2, 224, 131_072)]
    made = quote(recipe(*phases), Request(AWS, machine="modelarts-8xV100", nodes=1024))
    out = io.StringIO()
    Console(width=80, file=out).print(told(made))
    lines = out.getvalue().splitlines()
    assert "\u2026" not in out.getvalue()
    (head,) = (line for line in lines if line.strip().startswith("nodes "))
    counts = [int(word) for word in head.split()[1:]]
    assert counts[-1] == 1024
    assert len(counts) >= 4
