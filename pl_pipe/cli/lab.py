"""`pl-pipe lab`: rehearse a cluster on this machine. user -> *lab commands* -> pl_pipe.lab."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pl_pipe.cli.messages import say, set_debug
from pl_pipe.cluster import LinkConfig
from pl_pipe.errors import ConfigError, LabError
from pl_pipe.lab import Lab, remove_abandoned, state
from pl_pipe.lab.interruption import deferred, ending_by_exception
from pl_pipe.lab.tools import check_machine
from pl_pipe.units import format_bytes, format_duration

app = typer.Typer(
    name="lab",
    help="Rehearse a cluster on this machine: hosts as network namespaces, links shaped by tc. Needs root.",
    no_args_is_help=True,
)

_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
_INTERRUPTED = 128 + 2
_ASKED_S = 5.0
"""Before a program on a host is killed."""
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks (as does PL_PIPE_DEBUG=1).")]
Name = Annotated[str | None, typer.Option("--lab", help="Which lab, where several stand.")]


def split_at_dashes(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """The tokens before and behind the first `--` of `lab`: Typer would drop it, and read what follows as its own."""
    if arguments[:1] != ["lab"] or "--" not in arguments:
        return arguments, None
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


@app.command(context_settings=_OVERRIDES)
def run(ctx: typer.Context, debug: Debug = False) -> None:
    """Run a command on all hosts: `pl-pipe lab run cluster=lab_4x1_1gbit -- fit recipe=vgg16 strategy=pipedream`.

    Or a program of your own: `… -- python train.py`.
    """
    # Hydra takes a second
    from pl_pipe.cli.lab_command import (
        check_behind_dashes,
        elastic_limits,
        lab_settings,
        program_of,
        with_run_folder,
    )
    from pl_pipe.lab.rehearsal import rehearse, rehearse_elastically

    set_debug(debug)
    check_machine()
    given = check_behind_dashes(ctx.obj)
    settings = lab_settings(ctx.args)
    program = program_of(given, settings.cluster, ctx.args)
    elastic = elastic_limits(program, settings.cluster)
    _remove_abandoned()
    lab = Lab(settings.cluster)
    folder = settings.output_root / "lab" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{lab.name}"
    with ending_by_exception():
        try:
            lab.up()
            say(f"lab {lab.name}: {_described(lab)}")
            if elastic is None:
                code = rehearse(lab, program, folder=folder, say=say)
            else:
                *limits, first = elastic
                code = rehearse_elastically(
                    lab,
                    with_run_folder(program, folder / "run"),
                    limits=(limits[0], limits[1]),
                    first=first,
                    folder=folder,
                    say=say,
                )
            _say_transferred(lab)
        except KeyboardInterrupt:
            code = _INTERRUPTED
            with suppress(LabError, OSError):  # it may not have been there yet
                _say_transferred(lab)
        finally:
            lab.down()
    say(f"each host's output: {folder}")
    raise typer.Exit(code)


@app.command(context_settings=_OVERRIDES)
def up(ctx: typer.Context, debug: Debug = False) -> None:
    """Set a lab up and leave it: `pl-pipe lab up cluster=lab_4x1_1gbit`; the last line is its name."""
    from pl_pipe.cli.lab_command import lab_settings

    set_debug(debug)
    check_machine()
    settings = lab_settings(ctx.args)
    _remove_abandoned()
    lab = Lab(settings.cluster, kept=True)
    with ending_by_exception(), lab.removed_on_error():
        lab.up()
    say(_described(lab))
    say(lab.name)


@app.command()
def down(lab: Name = None, debug: Debug = False) -> None:
    """End what runs in a lab and remove it."""
    set_debug(debug)
    check_machine()
    found = Lab.open(lab)
    found.down()
    say(f"lab {found.name} is removed")


@app.command(name="exec")
def execute(
    ctx: typer.Context,
    host: Annotated[str, typer.Argument(help="Such as host1.")],
    lab: Name = None,
    debug: Debug = False,
) -> None:
    """Run any program on one host: `pl-pipe lab exec host1 -- ip address`."""
    set_debug(debug)
    if not ctx.obj:
        raise ConfigError("there is no program to run; put one behind --, such as pl-pipe lab exec host1 -- ip address")
    check_machine()
    found = Lab.open(lab)
    code = _waited_for(lambda: found.start(host, ctx.obj), ctx.obj[0])
    raise typer.Exit(code if code >= 0 else 128 - code)


@app.command()
def status(debug: Debug = False) -> None:
    """List the labs of this machine, their links and traffic."""
    set_debug(debug)
    known = state.labs()
    if not known:
        say("no lab stands on this machine")
        return
    table = Table("lab", "state", "since", "hosts", "links", "traffic")
    for entry in known:
        owner = "stands until lab down" if entry.owner is None else f"of process {entry.owner.pid}"
        groups: dict[str, list[str]] = {}
        for host, link in entry.links.items():
            groups.setdefault(str(link), []).append(host)
        links = [f"{', '.join(hosts)}: {link}" for link, hosts in groups.items()]
        if str(entry.inside) != "uncapped":
            links.append(f"inside a host: {entry.inside}")
        table.add_row(
            entry.lab,
            "abandoned: pl-pipe lab clean" if entry.abandoned else owner,
            format_duration(time.time() - entry.since),
            f"{len(entry.hosts)} of {entry.devices_per_host} device(s)"
            + (f", {len(entry.spectators)} spectator(s)" if entry.spectators else ""),
            "\n".join(links),
            "\n".join(f"{running.flow}{'' if running.runs else ' (ended)'}" for running in entry.flows),
        )
    Console().print(table)
    for entry in known:
        for running in entry.flows:
            if not running.runs:
                say(f"lab {entry.lab}: {running.flow} has ended by itself; see {state.traffic_log(entry.lab)}")


@app.command()
def clean(
    lab: Annotated[str | None, typer.Argument(help="A lab to remove, also if it is used.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all labs, also those that are used.")] = False,
    debug: Debug = False,
) -> None:
    """Remove labs whose command has died; with a name or --all, also live ones."""
    set_debug(debug)
    check_machine()
    if lab is not None:
        removed = [state.find(lab).lab]
    elif everything:
        removed = [entry.lab for entry in state.labs()]
    else:
        removed = [entry.lab for entry in state.labs() if entry.abandoned]
    for name in removed:
        Lab.open(name).down()
    say(f"removed: {', '.join(removed)}" if removed else "nothing to remove")


@app.command(name="set-link")
def set_link(
    host: Annotated[str, typer.Argument(help="Such as host2.")],
    changes: Annotated[
        list[str],
        typer.Argument(
            help="Some of rate=100mbit latency=5ms loss=0.1%; rate=uncapped, latency=0, loss=0 take them off."
        ),
    ],
    lab: Name = None,
    debug: Debug = False,
) -> None:
    """Change a host's link while it is used: `pl-pipe lab set-link host2 rate=100mbit`."""
    set_debug(debug)
    check_machine()
    wanted = LinkConfig(**_settings(changes, ("rate", "latency", "loss")))
    found = Lab.open(lab)
    link = found.set_link(host, wanted)
    say(f"lab {found.name}: {host} has {link}")


@app.command()
def traffic(
    source: Annotated[str, typer.Argument(help="The host that sends.")],
    target: Annotated[str, typer.Argument(help="The host that receives.")],
    setting: Annotated[str, typer.Argument(help="rate=300mbit; rate=0 ends it.")],
    lab: Name = None,
    debug: Debug = False,
) -> None:
    """Send other traffic over the links: `pl-pipe lab traffic host1 host3 rate=300mbit`."""
    set_debug(debug)
    check_machine()
    rate = _settings([setting], ("rate",))["rate"]
    found = Lab.open(lab)
    flow = found.set_traffic(source, target, rate, ends_with_owner=False)
    say(f"lab {found.name}: {flow or f'no more traffic from {source} to {target}'}")


def _settings(tokens: list[str], known: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for token in tokens:
        name, separator, value = token.partition("=")
        if not separator or name not in known or not value:
            raise ConfigError(f"{token!r} is no setting of a link here; give {', '.join(f'{key}=…' for key in known)}")
        found[name] = value
    return found


def _remove_abandoned() -> None:
    for name in remove_abandoned():
        say(f"removed lab {name}, whose command had died")


def _described(lab: Lab) -> str:
    found = state.find(lab.name)
    links = ", ".join(sorted({str(link) for link in found.links.values()}))
    return f"{len(found.hosts)} host(s) of {found.devices_per_host} device(s), links {links}"


def _waited_for(start: Callable[[], "subprocess.Popen[Any]"], program: str) -> int:
    """What the program ends with. It ends with the command, also where that is interrupted as soon as it has begun."""
    process: subprocess.Popen[Any] | None = None
    with ending_by_exception():
        try:
            with deferred():
                process = start()
            return process.wait()
        except BaseException:
            if process is not None:
                _end(process, program)
            raise


def _end(process: "subprocess.Popen[Any]", program: str) -> None:
    """A program that does not care is killed, with all of its session; a second Ctrl-C does so at once."""
    try:
        process.terminate()
        process.wait(_ASKED_S)
    except subprocess.TimeoutExpired:
        say(f"{program} was asked to end {_ASKED_S:g} s ago; killing it")
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _say_transferred(lab: Lab) -> None:
    parts = [
        f"{host} sent {format_bytes(sent)}, received {format_bytes(received)}"
        for host, (sent, received) in lab.transferred().items()
    ]
    say("over the links: " + "; ".join(parts))
