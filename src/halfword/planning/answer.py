"""What each preset holds of one model, on the first rank: at three moments, by component."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from halfword.memory import Memory, plan
from halfword.memory.trace import Traced
from halfword.planning.request import Request
from halfword.train.config import PRESETS, RELEASED, Formats
from halfword.train.footprint import rule_name

BASELINE = "fp32-master"
SLOTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
ENTRY, BETWEEN, PEAK = "at_step_entry", "between_steps", "peak"

Trace = Callable[[bool], Traced]
Sizes = dict[str, int]  # bytes by component, "total" the last


@dataclass(frozen=True)
class Row:
    """One way to keep the numbers of a model.

    Attributes:
        name: the preset, or the formats where none is like it.
        formats: of master weights and moments.
        released: whether gradients are.
        moments: bytes by component and moment; the peak only where a step was traced.
    """

    name: str
    formats: Formats
    released: bool
    moments: dict[str, Sizes]

    @property
    def largest_bytes(self) -> int:
        """The most that is known to be held at one time."""
        return max(sizes["total"] for sizes in self.moments.values())

    def fits(self, device_memory: int | None) -> bool | None:
        """Whether that is no more than there is; None: nobody said how much there is."""
        return None if device_memory is None else self.largest_bytes <= device_memory


def answer(request: Request, trace: Trace | None) -> list[Row]:
    """Return a row for each preset, and for the formats that were asked for where none has them.

    Args:
        request: the question.
        trace: traces a step, with gradients released or not; None: no peak.
    """
    config = request.config
    wanted: dict[str, tuple[Formats, bool]] = {
        name: (formats, name in RELEASED) for name, formats in PRESETS.items()
    }
    own = config.formats, config.release_gradients
    if own not in wanted.values():
        wanted["+".join((*own[0], *["released"] * own[1]))] = own
    traced = {}
    if trace is not None:
        traced = {released: trace(released) for released in sorted({r for _, r in wanted.values()})}
    return [
        Row(name, formats, released, _moments(request, formats, released, traced.get(released)))
        for name, (formats, released) in wanted.items()
    ]


def chosen(request: Request, rows: list[Row]) -> Row:
    """Return the row that the settings mean."""
    own = request.config.formats, request.config.release_gradients
    return next(row for row in rows if (row.formats, row.released) == own)


def _moments(
    request: Request, formats: Formats, released: bool, traced: Traced | None
) -> dict[str, Sizes]:
    planned = plan(
        request.shapes,
        *formats,
        rule_name(request.config),
        request.sharding,
        released=released,
        accumulated=request.config.gradient_accumulation_steps > 1,
    )
    moments = {name: _sizes(memory, request) for name, memory in planned.items()}
    if traced is not None:
        moments[PEAK] = _peak(moments[ENTRY], moments[BETWEEN], traced.peak, request)
    return moments


def _sizes(memory: Memory, request: Request) -> Sizes:
    components = memory.components
    sizes = {
        "weights": sum(components["weights"].values()),
        "master": sum(components.get("master_weights", {}).values()),
        "gradients": sum(components.get("gradients", {}).values()),
    }
    scales = 0
    for key, size in components.get("moments", {}).items():
        if key.endswith("_scale"):
            scales += size
        else:
            slot = max((slot for slot in SLOTS if key.startswith(slot)), key=len)
            sizes[slot] = sizes.get(slot, 0) + size
    sizes["scales"] = scales
    if request.vocab_size is not None:  # else nobody knows how many tensors there are
        sizes["step_counters"] = components["scalars"]["step"]
    if request.sharding.has_buckets:
        sizes["communication"] = components.get("communication", {}).get("buckets", 0)
    return _with_total(sizes)


def _peak(entry: Sizes, between: Sizes, traced: Mapping[str, int], request: Request) -> Sizes:
    """Put a traced peak upon what stays: weights, masters, moments."""
    beyond = {name: size for name, size in traced.items() if name != "weights"}
    known = entry["gradients"] if request.config.gradient_accumulation_steps > 1 else 0
    if known and beyond.get("inputs", 0) >= known:  # sums of gradients that were there before
        beyond["inputs"] -= known
        beyond["gradients"] = beyond.get("gradients", 0) + known
    if buckets := between.get("communication", 0):
        # The trace has them among gradients and activations: what its tracker calls them depends
        # on whether a gradient has come to be a view of them yet.
        beyond["activations"] = beyond.get("activations", 0) - buckets
    stays = {name: size for name, size in between.items() if name not in ("gradients", "total")}
    sizes = {"weights": stays.pop("weights"), "gradients": 0, **stays}
    for name, size in beyond.items():
        sizes[name] = sizes.get(name, 0) + size
    return _with_total(sizes)


def _with_total(sizes: Sizes) -> Sizes:
    return {**sizes, "total": sum(sizes.values())}


def to_table(request: Request, rows: list[Row], unseen: tuple[str, ...]) -> dict[str, Any]:
    """Return the answer as JSON can hold it; sizes in bytes."""
    traced = any(PEAK in row.moments for row in rows)
    return {
        "num_parameters": num_parameters(request),
        "world_size": request.world_size,
        "zero_stage": request.config.zero_stage,
        "settings": request.config.model_dump(mode="json"),
        "shapes_known": request.vocab_size is not None,
        "device_memory_bytes": request.device_memory,
        "chosen": chosen(request, rows).name,
        "presets": {row.name: _row_table(row, request.device_memory) for row in rows},
        "not_seen_by_the_trace": list(unseen) if traced else None,
    }


def num_parameters(request: Request) -> int:
    """Return the elements of all parameters, on all ranks together."""
    return sum(map(math.prod, request.shapes))


def _row_table(row: Row, device_memory: int | None) -> dict[str, Any]:
    tables = {
        moment: {f"{name}_bytes": size for name, size in sizes.items()}
        for moment, sizes in row.moments.items()
    }
    return {
        **row.formats._asdict(),
        "release_gradients": row.released,
        "per_rank": tables[ENTRY],
        BETWEEN: tables[BETWEEN],
        PEAK: tables.get(PEAK),
        "fits": row.fits(device_memory),
    }
