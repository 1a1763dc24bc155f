"""The command line: one thin function a verb."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from raytrain.errors import RaytrainError, describe_bug

if TYPE_CHECKING:
    from raytrain.session import Result

_USAGE = 2  # typer's own status for a wrong option, which it explains

Name = TypeVar("Name", bound=str)

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


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Train image classifiers to a target accuracy, on one laptop or a Ray cluster."""
    if version:
        from importlib.metadata import version as installed

        print(f"raytrain {installed('raytrain')}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


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
    elastic: Annotated[
        Literal["restart", "step"] | None,
        typer.Option(help="What a lost worker costs; as --set faults.elastic=..."),
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="USD for all the hardware; gives the cost.")
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Show the logs of Ray and of the workers.")] = False,
) -> None:
    """Train a recipe. Exit status 0: done as asked; 3: target missed; 1: anything else."""
    from raytrain.recipe.load import load_recipe
    from raytrain.session import tell

    mode = [f"faults.elastic={elastic}"] if elastic else []
    chosen = load_recipe(recipe, [*(overrides or ()), *mode])
    result = _fit(
        chosen,
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


Spaces = Annotated[
    list[Path] | None,
    typer.Option(help="File with space(draw); more than once: drawn together."),
]
Search = Annotated[
    Literal["random", "tpe", "bohb", "pb2"], typer.Option(help="How values are chosen.")
]
Scheduler = Annotated[
    Literal["asha", "none"], typer.Option(help="Whether trials that are behind are stopped.")
]
Objective = Annotated[
    Literal["accuracy", "seconds"],
    typer.Option(help="Best top-1 within the epochs, or time to the recipe's target."),
]
Factor = Annotated[
    int, typer.Option(min=2, help="About one of this many passes a rung; the rungs' ratio too.")
]
Concurrent = Annotated[
    int | None, typer.Option(min=1, help="Trials at a time; by default as many as fit.")
]
Retrain = Annotated[
    int, typer.Option(min=0, help="New seeds to train the best recipe with afterwards.")
]
TimeBudget = Annotated[
    float | None, typer.Option(min=0, help="Seconds after which no more is trained.")
]
Resume = Annotated[
    Path | None, typer.Option(help="Go on with the sweep in this folder, with its own settings.")
]


@app.command()
def sweep(  # noqa: PLR0913, PLR0917 (the options of the command line)
    context: typer.Context,
    recipe: Annotated[str | None, typer.Argument(help="As for train.")] = None,
    space: Spaces = None,
    data: Annotated[str | None, typer.Option(help="A ShardSet, as for train.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Trials.")] = 24,
    search: Search = "random",
    scheduler: Scheduler = "asha",
    objective: Objective = "accuracy",
    grace_epochs: Annotated[int, typer.Option(min=1, help="Epochs before the first rung.")] = 1,
    factor: Factor = 4,
    workers_per_trial: Annotated[int, typer.Option(min=1)] = 1,
    concurrent: Concurrent = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the samples.")] = 0,
    retrain: Retrain = 3,
    time_budget: TimeBudget = None,
    out: Annotated[Path | None, typer.Option(help="Folder for everything.")] = None,
    resume: Resume = None,
    overrides: Overrides = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
    verbose: Annotated[bool, typer.Option(help="Show Ray's own log.")] = False,
) -> None:
    """Search a space of recipes with Ray Tune; stops what is behind, hands back the best recipe.

    Exit status 1 where no trial came to a result.
    """
    from rich.console import Console

    from raytrain.api import resume_sweep
    from raytrain.api import sweep as run
    from raytrain.recipe.load import load_recipe
    from raytrain.tuning.options import SweepOptions

    how: dict[str, Any] = {"time_budget": time_budget, "verbose": verbose}
    if resume is not None:
        _nothing_else(context, {"resume", *how})
        done = resume_sweep(resume, **how)
    elif recipe is None or not space or data is None:
        raise RaytrainError("sweep needs RECIPE, --space FILE and --data SET, or --resume DIR")
    else:
        options = {name: context.params[name] for name in SweepOptions.model_fields}
        chosen = load_recipe(recipe, overrides or ())
        done = run(chosen, data, space, out=out, device=device, **how, **options)
    Console().print(done.report.table())
    print(done.report.closing(done.folder))


def _nothing_else(context: typer.Context, allowed: set[str]) -> None:
    """Refuse what `--resume` would not heed: the sweep's own settings decide."""
    for option in context.command.params:
        name = option.name or ""
        source = context.get_parameter_source(name)
        if name not in allowed and source is not None and source.name == "COMMANDLINE":
            raise RaytrainError(
                f"--resume: the sweep knows its own {option.opts[-1]}; leave it out"
            )


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
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories; other folders among them are skipped.")
    ],
    png: Annotated[Path, typer.Option(help="Where to draw the convergence picture.")] = Path(
        "convergence.png"
    ),
    against: Annotated[
        list[Path] | None,
        typer.Option(help="JSON file of a DAWNBench entry, its TSV beside it; more than once."),
    ] = None,
) -> None:
    """Print a table of runs and draw their convergence in one picture."""
    from rich.console import Console

    from raytrain.run.report import comparison, only_runs
    from raytrain.run.report import report as make

    runs, others = only_runs(runs)
    for folder in others:
        print(f"skipped {folder}: not a run directory", file=sys.stderr)
    Console().print(make(runs, png))
    print(f"picture: {png}")
    if against:
        Console().print(comparison(runs, against))


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
    _write_numbers(json, report.as_json())


@bench_app.command("loop")
def bench_loop(  # noqa: PLR0913, PLR0917 (the options of the command line)
    recipe: Recipe,
    data: Annotated[str, typer.Option(help="A ShardSet: a folder or an s3:// address.")],
    workers: Annotated[str, typer.Option(help="Numbers of workers, each measured.")] = "1,2",
    phase: Annotated[int, typer.Option(min=0, help="Number of the recipe's phase.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a turn.")] = 50,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each loop.")] = 5,
    overrides: Overrides = None,
    json: Annotated[Path | None, typer.Option(help="Where to write all numbers.")] = None,
) -> None:
    """Measure the training loop beside a bare loop in plain torch."""
    from rich.console import Console

    from raytrain.bench.loop import LoopOptions
    from raytrain.bench.loop import bench_loop as run
    from raytrain.data.shards import ShardSet
    from raytrain.recipe.load import load_recipe

    options = LoopOptions(_numbers("--workers", workers), phase, steps, repeats)
    report = run(load_recipe(recipe, overrides or ()), ShardSet.open(data), options)
    Console().print(report.table())
    _write_numbers(json, report.as_json())


@bench_app.command("accuracy")
def bench_accuracy(
    recipe: Recipe,
    data: Annotated[str, typer.Option(help="A ShardSet: a folder or an s3:// address.")],
    out: Annotated[Path, typer.Option(help="Folder for the report and the logs of all runs.")],
    against: Annotated[
        str,
        typer.Option(
            help="plain, timm (plain:epochs=20:lr=0.1 changes one), without-FEATURE, ablations."
        ),
    ] = "plain,timm,ablations",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each.")] = 5,
    overrides: Overrides = None,
) -> None:
    """Measure seconds to the recipe's target beside plain recipes and with features off."""
    from rich.console import Console

    from raytrain.bench.accuracy import bench_accuracy as run
    from raytrain.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    report = run(loaded, data, against.split(","), seeds, out)
    Console().print(report.table())
    print(f"numbers and logs: {out}")


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise RaytrainError(f"{option} {text}: give numbers of at least 1, such as 1,2")
    return found


def _write_numbers(path: Path | None, text: str) -> None:
    if path:
        path.write_text(text + "\n", encoding="utf-8")
        print(f"numbers: {path}")


@bench_app.command("checkpoint")
def bench_checkpoint(
    model: Annotated[str, typer.Option(help="As in a recipe.")] = "resnet50",
    folder: Annotated[Path | None, typer.Option(help="Storage to write to.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each rival.")] = 5,
    device: Annotated[str, typer.Option(help="As torch names it.")] = "cpu",
    json: Annotated[Path | None, typer.Option(help="Where to write all numbers.")] = None,
) -> None:
    """Measure how long a checkpoint keeps the training loop, beside other ways to write one."""
    from rich.console import Console

    from raytrain.bench.checkpoint import bench_checkpoint as run

    report = run(model, folder, repeats, device)
    Console().print(report.table())
    _write_numbers(json, report.as_json())


@bench_app.command("elastic")
def bench_elastic(  # noqa: PLR0913, PLR0917 (the options of the command line)
    recipe: Recipe,
    data: Annotated[str, typer.Option(help="A ShardSet, in a folder.")],
    out: Annotated[Path, typer.Option(help="New folder for the runs and their logs.")],
    workers: Annotated[int, typer.Option(min=2, help="Of each contender.")] = 3,
    against: Annotated[
        str, typer.Option(help="step, restart: our modes; ray: plain Ray Train.")
    ] = "step,restart,ray",
    faults: Annotated[str, typer.Option(help="Kinds: kill, hang, drain, remove_node.")] = "kill",
    repeats: Annotated[int, typer.Option(min=1, help="Of each fault.")] = 3,
    patience: Annotated[float, typer.Option(min=1, help="Most seconds for a recovery.")] = 300,
    minutes: Annotated[
        float, typer.Option(min=0, help="Also with a fault a minute for so long, for the goodput.")
    ] = 0,
    overrides: Overrides = None,
    json: Annotated[Path | None, typer.Option(help="Where to write all numbers.")] = None,
) -> None:
    """Measure what faults cost, on a cluster of raylets on this machine, beside plain Ray Train."""
    from rich.console import Console

    from raytrain.bench.elastic import CONTENDERS, FAULTS, ElasticOptions
    from raytrain.bench.elastic import bench_elastic as run
    from raytrain.recipe.load import load_recipe

    options = ElasticOptions(
        workers=workers,
        contenders=_named("--against", against, CONTENDERS),
        faults=_named("--faults", faults, FAULTS),
        repeats=repeats,
        patience_s=patience,
        minutes=minutes,
    )
    report = run(load_recipe(recipe, overrides or ()), data, out, options)
    Console().print(report.tables())
    print(report.images())
    _write_numbers(json, report.as_json())


def _named(option: str, text: str, known: tuple[Name, ...]) -> tuple[Name, ...]:
    found = tuple(name for part in text.split(",") for name in known if name == part)
    if len(found) != len(text.split(",")):
        raise RaytrainError(f"{option} {text}: give some of {', '.join(known)}, with commas")
    return found


@bench_app.command("sweep")
def bench_a_sweep(  # noqa: PLR0913, PLR0917 (the options of the command line)
    recipe: Recipe,
    space: Annotated[list[Path], typer.Option(help="File with space(draw).")],
    data: Annotated[str, typer.Option(help="A ShardSet: a folder or an s3:// address.")],
    out: Annotated[Path, typer.Option(help="Folder for everything.")],
    samples: Annotated[int, typer.Option(min=2, help="Trials of each sweep.")] = 24,
    seeds: Annotated[int, typer.Option(min=1, help="Draws of the samples.")] = 1,
    by_hand: Annotated[int, typer.Option(min=0, help="Trainings to make by hand too.")] = 4,
    factor: Annotated[int, typer.Option(min=2, help="Of ASHA.")] = 4,
    json: Annotated[Path | None, typer.Option(help="Where to write all numbers.")] = None,
    overrides: Overrides = None,
) -> None:
    """Compare ASHA with training the same samples to their ends, and a sweep with doing it by hand.

    One trial runs at a time.
    """
    from rich.console import Console

    from raytrain.bench.sweep import as_json, bench_sweep, tables
    from raytrain.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    found = bench_sweep(
        loaded,
        data,
        space,
        out,
        samples=samples,
        seeds=range(seeds),
        by_hand=by_hand,
        factor=factor,
    )
    Console().print(tables(found))
    if json:
        json.write_text(as_json(found, " ".join(sys.argv)) + "\n", encoding="utf-8")
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


def _fit(*args: Any, **options: Any) -> Result:
    """``fit``, with an error of the user's own code in one line."""
    from raytrain.api import fit
    from raytrain.run.startup import StartUp, process_age

    try:
        return fit(*args, startup=StartUp(imports=process_age()), **options)
    except RaytrainError:
        raise
    except Exception as error:
        notes = "".join(f"; all of it is in {note}" for note in getattr(error, "__notes__", []))
        raise RaytrainError(f"{describe_bug(error)}{notes}") from error


def main() -> None:
    """Run the command line; a user's mistake is one line and exit status 1."""
    sys.path.insert(0, str(Path.cwd()))  # so that module:function finds the user's own files
    try:
        app()
    except RaytrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except SystemExit as end:
        sys.exit(1 if end.code == _USAGE else end.code)
