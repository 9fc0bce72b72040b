"""The command line: what a user types, and every mistake in it told in one line."""

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import halfword
from halfword.errors import UsageError
from halfword.options import with_settings
from halfword.train.config import PLANNED, TrainConfig

FAILURE = 1
NONFINITE = 1
USAGE_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (by default the process's own) and return its exit code."""
    arguments = _with_bare_resume(sys.argv[1:] if arguments is None else arguments)
    commands = _commands()
    named = [argument for argument in arguments[:1] if argument in commands.commands]
    name = " ".join(["halfword", *named])
    try:
        with _warnings_in_one_line(name):
            code = commands.main(arguments, prog_name="halfword", standalone_mode=False)
    except UsageError as error:
        return _fail(name, str(error), USAGE_ERROR)
    except typer.TyperException as error:
        return _fail(name, _in_one_line(error), USAGE_ERROR)
    except OSError as error:  # the disk is full, say
        return _fail(name, str(error), FAILURE)
    if code == INTERRUPTED:  # typer turned KeyboardInterrupt into it
        return _fail(name, "interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def train(
    config: Annotated[
        Path | None,
        typer.Option("--config", help="a TOML file of settings, named as the options here"),
    ] = None,
    deepspeed_config: Annotated[
        Path | None,
        typer.Option("--deepspeed_config", help="a JSON file of DeepSpeed's, instead of --config"),
    ] = None,
    use_real_data: Annotated[
        bool, typer.Option("--use_real_data", help="train on WikiText-103, by --dataset")
    ] = False,
    deepspeed: Annotated[
        bool, typer.Option("--deepspeed", help="no effect: taken for DeepSpeed's commands")
    ] = False,
    local_rank: Annotated[
        int | None, typer.Option("--local_rank", help="no effect: the launcher's LOCAL_RANK counts")
    ] = None,
    **flags: Any,
) -> int:
    """Train a Llama-shaped model on text."""
    from halfword.checkpoint import CheckpointError
    from halfword.train.launch import settle, with_real_data
    from halfword.train.loop import Stopped, run
    from halfword.train.world import TIMEOUT_S, World

    given = {name: value for name, value in flags.items() if value is not None}
    timeout_s = given.get("timeout", TIMEOUT_S)
    world = World.join(timeout_s if timeout_s > 0 else TIMEOUT_S)  # a wrong one is told of below
    console = Console(quiet=not world.is_first)

    def settled() -> str:
        flags = with_real_data(given) if use_real_data else given
        settings = settle(config, deepspeed_config, flags, world.size, console)
        for option, value in {"deepspeed": deepspeed or None, "local_rank": local_rank}.items():
            if value is not None:
                console.print(f"--{option} has no effect here")
        return settings.model_dump_json()

    try:
        settings = world.publish("settings", settled)
        run(TrainConfig.model_validate_json(settings), console, world)
        world.leave()
    except Stopped as stopped:
        world.leave()
        return stopped.exit_code
    except (Exception, KeyboardInterrupt) as error:
        if world.size > 1:
            world.end(error)
        if isinstance(error, CheckpointError):  # a full disk; the earlier checkpoints are whole
            return _fail("halfword train", str(error), FAILURE)
        raise
    return 0


def plan(
    config: Annotated[
        Path | None, typer.Option("--config", help="a TOML file of settings, as train takes it")
    ] = None,
    params: Annotated[
        str | None, typer.Option(metavar="N", help="only a number of parameters, as 30e9")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="a Hugging Face config.json, or its folder")
    ] = None,
    world_size: Annotated[int, typer.Option("--world_size", help="processes, one a device")] = 1,
    device_memory: Annotated[
        str | None,
        typer.Option("--device_memory", metavar="GIB", help="of one device, as 80 or 80GB"),
    ] = None,
    trace: Annotated[
        bool, typer.Option(help="run the step on fake tensors for activations and the peak")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, sizes in bytes")] = False,
    **flags: Any,
) -> None:
    """Say what a run will hold of memory under every preset, before it runs."""
    from halfword.planning import plan
    from halfword.planning.request import read_request

    given = {name: value for name, value in flags.items() if value is not None}
    request = read_request(config, params, model, world_size, device_memory, given)
    plan(request, trace, as_json)


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN ...", help="run folders or step,loss CSV files")
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="folder for the report, or a .png for the loss plot"),
    ],
) -> int:
    """Compare runs in loss, memory and time, and say whether they are equal bit for bit."""
    from halfword.report import compare

    return NONFINITE if compare(runs, output, Console()).has_nonfinite else 0


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN ...", help="run folders or step,loss CSV files")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="the page, an .html file")] = Path(
        "report.html"
    ),
) -> int:
    """Show runs on one self-contained page with charts that zoom and answer to hovering."""
    from halfword.report import report

    return NONFINITE if report(runs, output, Console()).has_nonfinite else 0


def export(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="a run's folder or a checkpoint")],
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for the model, new")],
    dtype: Annotated[
        str, typer.Option(metavar="bf16|fp32", help="the weights as they are, or the masters")
    ] = "bf16",
) -> None:
    """Write a model in Hugging Face layout from a checkpoint."""
    from halfword.train.export import export

    export(source, output, dtype, Console())


def inspect(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="a run's folder or a checkpoint")],
) -> None:
    """Verify a checkpoint and show what it holds."""
    from halfword.train.export import inspect

    inspect(source, Console())


def doctor(
    build: Annotated[
        bool, typer.Option("--build", help="compile the CPU backend now, not at its first use")
    ] = False,
) -> None:
    """Say which backends work on this machine, and why one does not."""
    from halfword.doctor import doctor

    for finding in doctor(build):
        typer.echo(str(finding))


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="folder for the runs and the report")
    ] = Path("demo"),
) -> int:
    """Train under every precision on text that comes with Python, and compare them."""
    from halfword.demo import demo

    return demo(output, Console())


def _halfword(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="show the version")] = False,
) -> None:
    """Train in BF16, keep every bit of FP32."""
    if version:
        typer.echo(f"halfword {halfword.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _commands() -> Any:
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        # --num-layers and --num_layers are one option; help shows the second.
        context_settings={"token_normalize_func": lambda token: token.replace("-", "_")},
    )
    app.callback(invoke_without_command=True)(_halfword)
    app.command()(with_settings(train, TrainConfig.model_fields))
    app.command()(with_settings(plan, PLANNED))
    for command in (compare, report, export, inspect, doctor, demo):
        app.command()(command)
    return typer.main.get_command(app)


def _with_bare_resume(arguments: Sequence[str]) -> list[str]:
    """Let --resume stand alone for --resume auto."""
    words: list[str] = []
    for argument, after in zip(arguments, [*arguments[1:], "--"], strict=False):
        words.append(argument)
        if argument == "--resume" and after.startswith("-"):
            words.append("auto")
    return words


@contextlib.contextmanager
def _warnings_in_one_line(command: str) -> Iterator[None]:
    """Show halfword's warnings as it shows errors, without the line of code that gave them."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(
            f"{command}: warning: {message}", file=sys.stderr
        )
        yield


def _in_one_line(error: typer.TyperException) -> str:
    """Say what typer found wrong as halfword does: the argument first, then the fix."""
    message = error.message.rstrip(".")
    if option := getattr(error, "option_name", None):
        if near := getattr(error, "possibilities", None):
            return f"{option}: no such option; did you mean {near[0]}?"
        fix = message.removeprefix(f"Option {option!r} ").removesuffix(f": {option}")
        return f"{option}: {fix[0].lower()}{fix[1:]}"
    if parameter := getattr(error, "param", None):
        fix = message.removeprefix("Input ") or "missing"
        return f"{parameter.metavar or parameter.opts[0]}: {fix}"
    return message[0].lower() + message[1:]


def _fail(command: str, message: str, code: int) -> int:
    print(f"{command}: {message}", file=sys.stderr)
    return code
