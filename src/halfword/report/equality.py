"""Are two runs the same, bit for bit, and from which step are they not?"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfword.report.runs import Run


@dataclass(frozen=True)
class Verdict:
    """The second run held against the first, over all steps that these two have in common."""

    first: str  # label
    second: str  # label
    num_steps: int
    first_difference: int | None  # the step of the first loss that differs
    same_steps: bool  # the two runs took the same steps, so that their ends can be compared
    weights: bool | None  # equal by digest; None: not recorded, or not the same steps
    master_weights: bool | None

    @property
    def equal(self) -> bool:
        """Losses, weights and masters are known to be the same bits."""
        return self.first_difference is None and bool(self.weights and self.master_weights)

    def __str__(self) -> str:
        if self.first_difference is not None:
            return f"`{self.second}` differs from `{self.first}` from step {self.first_difference}"
        over = f"to the last bit over {self.num_steps} steps"
        if self.equal:
            return f"`{self.second}` equals `{self.first}` {over} (losses, weights, masters)"
        parts = {"weights": self.weights, "masters": self.master_weights}
        different = " and ".join(name for name, same in parts.items() if same is False)
        if different:
            return f"`{self.second}` has the losses of `{self.first}` {over}, but other {different}"
        unknown = " and ".join(name for name, same in parts.items() if same is None)
        why = "not recorded" if self.same_steps else "not compared, as the runs differ in length"
        return f"`{self.second}` has the losses of `{self.first}` {over} ({unknown} {why})"


def judge(first: Run, second: Run) -> Verdict:
    """Compare the losses of the common steps, then the weights that the runs ended with."""
    common = np.intersect1d(first.history.steps, second.history.steps)
    same_steps = np.array_equal(first.history.steps, second.history.steps)
    return Verdict(
        first=first.label,
        second=second.label,
        num_steps=len(common),
        first_difference=_first_difference(first, second, common),
        same_steps=same_steps,
        weights=_same_digest(first, second, "weights") if same_steps else None,
        master_weights=_same_digest(first, second, "master_weights") if same_steps else None,
    )


def _first_difference(first: Run, second: Run, common: NDArray[np.int64]) -> int | None:
    a, b = first.history.loss_at(common), second.history.loss_at(common)
    # Bits, not values: 0.0 and -0.0 differ. All NaNs are one, as everywhere in halfword.
    same = (a.view(np.int64) == b.view(np.int64)) | (np.isnan(a) & np.isnan(b))
    return None if same.all() else int(common[np.argmin(same)])


def _same_digest(first: Run, second: Run, of: str) -> bool | None:
    a, b = first.digest(of), second.digest(of)
    return None if a is None or b is None else a == b
