"""What a DeepSpeed file became, as a table."""

from collections import defaultdict

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfword.train.deepspeed.translation import Translation

KEY_WIDTH, VALUE_WIDTH = 35, 16  # most keys fit, and leave half a terminal for what they become


def show(translation: Translation, console: Console) -> None:
    """Print what keys become, once each what changes nothing, and what the command line gives."""
    document = translation.document
    table = Table(title=f"{document.file} in halfword", box=box.SIMPLE, title_justify="left")
    for name, width in {"key": KEY_WIDTH, "value": VALUE_WIDTH, "here": None}.items():
        table.add_column(name, overflow="fold", max_width=width)
    for key, text in translation.here.items():
        table.add_row(*(Text(cell) for cell in (key, document.shown(key), text)))
    console.print(table)
    reasons = defaultdict(list)
    for key, reason in translation.idle.items():
        reasons[reason].append(f"{key} {document.shown(key)}")
    # One line each, however narrow the terminal, so that they can be searched and piped.
    lines = [f"No effect here ({reason}): {', '.join(keys)}." for reason, keys in reasons.items()]
    if overruled := translation.overruled:
        pairs = (
            f"--{name} {translation.flags[name]} (not {key})" for name, key in overruled.items()
        )
        lines.append(f"The command line wins: {', '.join(pairs)}.")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
