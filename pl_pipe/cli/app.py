"""The commands. Each declares its own options and hands every token it does not know to Hydra's parser."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pl_pipe.cli import data, lab
from pl_pipe.cli.messages import debugging, print_error, say, set_debug
from pl_pipe.errors import PlPipeError

# Imports that take a second or more (Hydra, torch, Lightning) stand inside the commands that need them.

app = typer.Typer(
    name="pl-pipe",
    help="Train an unchanged LightningModule: choose a recipe, a data set and a strategy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(data.app)
app.add_typer(lab.app)

# Unknown options and `--help` must reach Hydra untouched.
_TO_HYDRA: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
}
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks (as does PL_PIPE_DEBUG=1).")]
ConfigDir = Annotated[Path | None, typer.Option(help="Your own configuration folder.")]


def _hydra_command(command: str, arguments: list[str], *, debug: bool) -> None:
    from pl_pipe.cli.front import run_command

    set_debug(debug)
    run_command(command, arguments)


def _hydra_tool(command: str, arguments: list[str], *, debug: bool) -> None:
    from pl_pipe.cli.front import run_tool

    set_debug(debug)
    run_tool(command, arguments)


@app.command(**_TO_HYDRA)
def fit(ctx: typer.Context, debug: Debug = False) -> None:
    """Train a recipe: `pl-pipe fit recipe=vgg16 strategy=ddp trainer.devices=4`."""
    _hydra_command("fit", ctx.args, debug=debug)


@app.command(**_TO_HYDRA)
def validate(ctx: typer.Context, debug: Debug = False) -> None:
    """Evaluate on validation data: `pl-pipe validate RUN_DIR`, or overrides with ckpt_path=FILE."""
    _hydra_command("validate", ctx.args, debug=debug)


@app.command(**_TO_HYDRA)
def test(ctx: typer.Context, debug: Debug = False) -> None:
    """Evaluate on test data: `pl-pipe test RUN_DIR`, or overrides with ckpt_path=FILE."""
    _hydra_command("test", ctx.args, debug=debug)


@app.command(**_TO_HYDRA)
def predict(ctx: typer.Context, debug: Debug = False) -> None:
    """Write predictions: `pl-pipe predict RUN_DIR predict.format=csv`."""
    _hydra_command("predict", ctx.args, debug=debug)


@app.command(**_TO_HYDRA)
def evaluate(ctx: typer.Context, debug: Debug = False) -> None:
    """Score checkpoints by the task's own measure (BLEU …): `pl-pipe evaluate RUN_DIR`."""
    _hydra_command("evaluate", ctx.args, debug=debug)


@app.command(**_TO_HYDRA)
def profile(ctx: typer.Context, debug: Debug = False) -> None:
    """Measure a recipe layer by layer: `pl-pipe profile recipe=vgg16`."""
    _hydra_command("profile", ctx.args, debug=debug)


@app.command(**_TO_HYDRA)
def probe(ctx: typer.Context, debug: Debug = False) -> None:
    """Measure the links between ranks: `pl-pipe probe trainer.devices=4`."""
    _hydra_tool("probe", ctx.args, debug=debug)


@app.command(**_TO_HYDRA)
def plan(ctx: typer.Context, debug: Debug = False) -> None:
    """Cut a profiled model into stages: `pl-pipe plan profile=profile.json cluster.devices=4`."""
    _hydra_tool("plan", ctx.args, debug=debug)


@app.command(**_TO_HYDRA)
def simulate(ctx: typer.Context, debug: Debug = False) -> None:
    """Predict how a plan runs: `pl-pipe simulate plan.path=plan.json schedule=pipedream`."""
    _hydra_tool("simulate", ctx.args, debug=debug)


@app.command(**_TO_HYDRA)
def sweep(ctx: typer.Context, debug: Debug = False) -> None:
    """Plot what pipelining gains on clusters of many sizes: `pl-pipe sweep profile=profile.json`."""
    _hydra_tool("sweep", ctx.args, debug=debug)


@app.command()
def stop(
    run_dir: Annotated[Path, typer.Argument(help="Directory of the run to stop.")],
    grace_s: Annotated[float, typer.Option(help="Seconds to end by itself before it is killed.")] = 10.0,
    debug: Debug = False,
) -> None:
    """End a run's processes on this machine."""
    from pl_pipe.cli.processes import stop_run

    set_debug(debug)
    say(stop_run(run_dir, grace_s=grace_s).describe(run_dir))


@app.command()
def recipes(config_dir: ConfigDir = None, debug: Debug = False) -> None:
    """List the models and data sets that can be trained."""
    from pl_pipe.cli.tables import data_table, recipe_table

    set_debug(debug)
    Console().print(recipe_table(config_dir), data_table(config_dir))
    say("Try: pl-pipe fit recipe=resnet18 data=synthetic trainer.max_epochs=1")


@app.command()
def strategies(config_dir: ConfigDir = None, debug: Debug = False) -> None:
    """List the ways to train."""
    from pl_pipe.cli.tables import strategy_table

    set_debug(debug)
    Console().print(strategy_table(config_dir))
    say("Try: pl-pipe fit recipe=vgg16 strategy=ddp trainer.devices=4")


@app.command()
def version() -> None:
    """Print the versions of pl-pipe and of what it stands on."""
    from pl_pipe.cli.versions import versions

    for name, number in versions().items():
        say(f"{name} {number}")


def main() -> None:
    """Runs a command; an error that the user can mend is one message, not a traceback."""
    try:
        arguments, behind_dashes = lab.split_at_dashes(sys.argv[1:])
        app(args=arguments, obj=behind_dashes)
    except PlPipeError as error:
        if debugging():
            raise
        print_error(error)
        sys.exit(1)
