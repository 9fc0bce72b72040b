"""What an optimizer and its parameters hold, by component and plane, counted by storage."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """Bytes held at one moment, each storage counted once (ties and views share theirs).

    Attributes:
        num_parameters: elements over all parameters.
        components: bytes by component (``weights``, ``master_weights``, ``moments``, ``gradients``,
            ``scalars``) and plane (a state key, or a dtype for weights and gradients).
    """

    num_parameters: int
    components: dict[str, dict[str, int]]

    @property
    def total_bytes(self) -> int:
        """Bytes over all components."""
        return sum(sum(planes.values()) for planes in self.components.values())

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes over all components by element of the parameters."""
        return self.total_bytes / max(1, self.num_parameters)


def measure(entries: Iterable[tuple[str, str, Tensor]], num_parameters: int) -> Memory:
    """Add up ``(component, plane, tensor)`` entries; a storage seen before counts nothing."""
    components: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for component, plane, size in _sizes(entries):
        components[component][plane] += size
    return Memory(num_parameters, {name: dict(planes) for name, planes in components.items()})


def _sizes(entries: Iterable[tuple[str, str, Tensor]]) -> Iterator[tuple[str, str, int]]:
    seen: set[int] = set()
    for component, plane, tensor in entries:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield component, plane, storage.nbytes()
