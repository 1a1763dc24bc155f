"""The command line: one thin function a verb."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from raytrain.errors import RaytrainError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train image classifiers to a target accuracy, on one laptop or a Ray cluster.",
)

Recipe = Annotated[str, typer.Argument(help="A YAML file, or the name of a recipe of raytrain's.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe: --set phases.0.batch=64"),
]


@app.command()
def prepare(  # noqa: PLR0913, PLR0917 (the options of the command line)
    src: Annotated[Path, typer.Argument(help="Folder of images.")],
    out: Annotated[Path, typer.Argument(help="Folder of the ShardSet to make.")],
    sizes: Annotated[
        str, typer.Option(help="Short sides in pixels to keep; `original` for the image as it is.")
    ] = "160,256,352",
    val_fraction: Annotated[
        float | None, typer.Option(help="Share of each class to hold out, where SRC has no val.")
    ] = None,
    val_labels: Annotated[
        Path | None, typer.Option(help="File name and class a line, for a flat val folder.")
    ] = None,
    quality: Annotated[int, typer.Option(help="JPEG quality of resized images.")] = 92,
    max_bad: Annotated[float, typer.Option(help="Share of unusable images to put up with.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Of the held-out images and the order.")] = 0,
    shard_images: Annotated[int | None, typer.Option(help="Images a file.")] = None,
    block_rows: Annotated[int, typer.Option(help="Images a block, the unit of reading.")] = 64,
) -> None:
    """Make a ShardSet of a folder of images; go on where an earlier prepare stopped."""
    from raytrain.orchestrate.prepare import PrepareOptions, parse_sizes
    from raytrain.orchestrate.prepare import prepare as run

    options = PrepareOptions(
        sizes=parse_sizes(sizes),
        val_fraction=val_fraction,
        val_labels=val_labels,
        seed=seed,
        quality=quality,
        max_bad=max_bad,
        shard_images=shard_images,
        block_rows=block_rows,
    )
    try:
        run(src, out, options)
    except KeyboardInterrupt as error:
        raise RaytrainError(
            "interrupted; the same command goes on where this one stopped"
        ) from error


@app.command()
def train(  # noqa: PLR0913, PLR0917 (the options of the command line)
    recipe: Recipe,
    data: Annotated[str, typer.Option(help="A ShardSet: a folder or an s3:// address.")],
    workers: Annotated[
        str | None, typer.Option(metavar="N|MIN:MAX", help="Workers; by default one a GPU.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run's files go; an unfinished run goes on.")
    ] = None,
    overrides: Overrides = None,
    engine: Annotated[
        Literal["ray", "inline"],
        typer.Option(help="inline: one worker in this process, without Ray."),
    ] = "ray",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="USD for all the hardware; gives the cost.")
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Show the logs of Ray and of the workers.")] = False,
) -> None:
    """Train a recipe. Exit status 0: done as asked; 3: target missed; 1: anything else."""
    from raytrain.api import fit
    from raytrain.recipe.load import load_recipe
    from raytrain.session import tell

    result = fit(
        load_recipe(recipe, overrides or ()),
        data,
        workers=workers,
        run_dir=run_dir,
        engine=engine,
        device=device,
        price_per_hour=price_per_hour,
        verbose=verbose,
    )
    print(tell(result))
    raise typer.Exit(result.exit_status)


@app.command()
def show(
    recipe: Recipe,
    images: Annotated[int, typer.Option(min=1, help="Number of training images.")],
    overrides: Overrides = None,
    png: Annotated[Path | None, typer.Option(help="Where to draw the curves.")] = None,
) -> None:
    """Print a recipe's plan and draw its curves."""
    from rich.console import Console

    from raytrain.recipe.load import load_recipe
    from raytrain.recipe.plan import Plan
    from raytrain.run.show import draw_plan, plan_table

    plan = Plan(load_recipe(recipe, overrides or ()), images)
    Console().print(plan_table(plan))
    picture = png or Path(f"{Path(recipe).stem}-plan.png")
    draw_plan(plan, picture)
    print(f"curves: {picture}")


@app.command()
def plan(  # noqa: PLR0913, PLR0917 (the options of the command line)
    recipe: Recipe,
    cluster: Annotated[Path, typer.Option(help="For `ray up`, or a RayCluster for KubeRay.")],
    images: Annotated[
        int, typer.Option(min=1, help="Number of training images; by default ImageNet's.")
    ] = 1_281_167,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="USD of one node; by default a known list price.")
    ] = None,
    target_minutes: Annotated[
        float | None, typer.Option(min=0, help="Find the cheapest number of nodes that makes it.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes to tell the phases of; by default the most.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="Type of the nodes, where the file doesn't tell.")
    ] = None,
    software: Annotated[
        str, typer.Option(help="What trains: raytrain, or a public run's, such as moxing-2018.")
    ] = "raytrain",
    bench: Annotated[
        Path | None, typer.Option(help="From `raytrain bench input --json` on such a machine.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Where to draw it.")] = None,
    overrides: Overrides = None,
) -> None:
    """Predict time and cost of a recipe on a cluster. Exit status 3: too slow for the target."""
    from rich.console import Console

    from raytrain.predict.quote import Request, quote
    from raytrain.predict.show import draw, told
    from raytrain.recipe.load import load_recipe

    request = Request(
        cluster, images, machine, software, bench, nodes, target_minutes, price_per_hour
    )
    made = quote(load_recipe(recipe, overrides or ()), request)
    Console().print(told(made))
    if png:
        draw(made, png)
        print(f"picture: {png}")
    raise typer.Exit(0 if made.in_time else 3)


data_app = typer.Typer(no_args_is_help=True, help="Look into a ShardSet, or compare two.")
app.add_typer(data_app, name="data")

ShardSetAddress = Annotated[
    str, typer.Argument(metavar="SET", help="A ShardSet: a folder or an s3:// address.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="By default one a core.")]


@data_app.command("check")
def check_data(shard_set: ShardSetAddress, threads: Threads = None) -> None:
    """Read all of a ShardSet and say what is wrong with it. Exit status 1 if anything is.

    Checksums, every image in every size, labels and counts, images in both splits or under two
    classes. Images that are twice in a split are named too, but aren't wrong.
    """
    from rich.console import Console
    from rich.progress import Progress

    from raytrain.data.check import balance_table, check_set
    from raytrain.data.shards import SPLITS, ShardSet

    shards = ShardSet.open(shard_set)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("checking", total=sum(map(shards.num_images, SPLITS)))
        findings = check_set(shards, threads, lambda images: bar.advance(task, images))
    Console().print(balance_table(shards))
    for finding in findings:
        print(f"{'wrong' if finding.is_wrong else 'note'}: {finding.text}")
    wrong = sum(finding.is_wrong for finding in findings)
    print(f"{shards.uri}: {wrong} wrong, {len(findings) - wrong} to note")
    raise typer.Exit(1 if wrong else 0)


@data_app.command("show")
def show_data(
    shard_set: ShardSetAddress,
    recipe: Annotated[str, typer.Option(help="A YAML file, or the name of one of raytrain's.")],
    phase: Annotated[int, typer.Option(min=0, help="Number of the recipe's phase.")] = 0,
    split: Annotated[Literal["train", "val"], typer.Option()] = "train",
    images: Annotated[int, typer.Option(min=1, help="At most.")] = 32,
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("images.png"),
    overrides: Overrides = None,
) -> None:
    """Draw what the model will really see in a phase, with the classes."""
    from raytrain.data.shards import ShardSet
    from raytrain.data.sheet import training_sheet, validation_sheet
    from raytrain.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    shards = ShardSet.open(shard_set, loaded.input)
    make = training_sheet if split == "train" else validation_sheet
    make(shards, loaded, phase, images).draw(out)
    print(f"picture: {out}")


@data_app.command("diff")
def diff_data(old: ShardSetAddress, new: ShardSetAddress, threads: Threads = None) -> None:
    """Say what changed from one ShardSet to another: classes, counts, options, images."""
    from raytrain.data.compare import compare_sets
    from raytrain.data.shards import ShardSet

    lines = compare_sets(ShardSet.open(old), ShardSet.open(new), threads)
    print("\n".join(lines) or "the same images, labels and order")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    png: Annotated[Path, typer.Option(help="Where to draw the convergence picture.")] = Path(
        "convergence.png"
    ),
) -> None:
    """Print a table of runs and draw their convergence in one picture."""
    from rich.console import Console

    from raytrain.run.report import report as make

    Console().print(make(runs, png))
    print(f"picture: {png}")


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("runs/demo"),
    workers: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Train real handwritten digits from image files to a target: the whole of raytrain once."""
    from raytrain.demo import run_demo

    raise typer.Exit(run_demo(folder, workers))


bench_app = typer.Typer(no_args_is_help=True, help="Measure what this machine can do.")
app.add_typer(bench_app, name="bench")


@bench_app.command("input")
def bench_input(
    where: Annotated[
        str, typer.Argument(metavar="DIR|SET", help="A folder of images, or a ShardSet.")
    ],
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each rival.")] = 5,
    seconds: Annotated[float, typer.Option(min=0, help="CPU seconds of a turn, at least.")] = 0.5,
    images: Annotated[int, typer.Option(min=2, help="Images to measure with, at most.")] = 512,
    sizes: Annotated[
        str, typer.Option(help="Short sides in pixels to prepare, where DIR holds images.")
    ] = "160,256,352,original",
    stream: Annotated[
        bool, typer.Option("--stream", help="Also measure the stream through Ray Data.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Where to write all numbers.")] = None,
) -> None:
    """Measure how fast images are decoded here, beside other loaders."""
    from rich.console import Console

    from raytrain.bench.input import BenchOptions, tables
    from raytrain.bench.input import bench_input as run
    from raytrain.orchestrate.prepare import parse_sizes

    report = run(where, BenchOptions(parse_sizes(sizes), images, repeats, seconds, stream))
    Console().print(tables(report))
    if json:
        json.write_text(report.as_json() + "\n", encoding="utf-8")
        print(f"numbers: {json}")


cluster_app = typer.Typer(no_args_is_help=True, help="Check files that describe a cluster.")
app.add_typer(cluster_app, name="cluster")


@cluster_app.command("check")
def check_cluster(
    files: Annotated[list[Path], typer.Argument(help="For `ray up`, or a RayCluster for KubeRay.")],
    data_gb: Annotated[
        float | None,
        typer.Option(min=0, help="GB that the data takes on a node's disk; by default ImageNet's."),
    ] = None,
) -> None:
    """Say what is wrong with cluster files, without asking any cloud. Exit status 1: something."""
    from raytrain.orchestrate.cluster_check import check_cluster_file

    found = {file: check_cluster_file(file, data_gb) for file in files}
    for file, findings in found.items():
        for finding in findings:
            print(f"{file}:{finding.line}: {finding.key}: {finding.text}")
        if not findings:
            print(f"{file}: ok")
    raise typer.Exit(1 if any(found.values()) else 0)


def main() -> None:
    """Run the command line; a user's mistake is one line and exit status 1."""
    sys.path.insert(0, str(Path.cwd()))  # so that module:function finds the user's own files
    try:
        app()
    except RaytrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
