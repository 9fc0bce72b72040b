"""Fields of TrainConfig as options of a command: a setting is named and described once."""

from collections.abc import Callable, Iterable
from inspect import Parameter, Signature, signature
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from halfword.train.config import TrainConfig

ALIASES = {"run": ["--run_dir"]}  # torchrun takes --run for an abbreviation of its own --run-path


def with_settings(command: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """Give a command one option for each of these fields of TrainConfig, after its own."""
    own = list(signature(command).parameters.values())[:-1]  # without **flags
    fields = {name: TrainConfig.model_fields[name] for name in names}
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=_option(name, field))
        for name, field in fields.items()
    ]

    def with_options(**flags: Any) -> Any:
        return command(**flags)

    with_options.__name__ = command.__name__
    with_options.__doc__ = command.__doc__
    with_options.__signature__ = Signature([*own, *options])  # type: ignore[attr-defined]
    return with_options


def _option(name: str, field: FieldInfo) -> Any:
    """Turn a field into the annotation that typer makes an option from."""
    kind: Any = field.annotation
    if NoneType in get_args(kind):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    is_repeatable = get_origin(kind) is list
    if is_repeatable:
        (kind,) = get_args(kind)
    metavar = None
    if get_origin(kind) is Literal:  # pydantic checks the choice, for flags and files alike
        kind, metavar = str, "|".join(get_args(kind))
    spellings = [f"--{name}/--no-{name}" if kind is bool else f"--{name}", *ALIASES.get(name, ())]
    help = str(field.description)
    if isinstance(field.default, str | int | float) and kind is not bool:
        help += f" [default: {field.default}]"
    option = typer.Option(*spellings, help=help, metavar=metavar, show_default=False)
    return Annotated[(list[kind] if is_repeatable else kind) | None, option]
