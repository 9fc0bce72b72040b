"""Learning-rate schedules: what the peak learning rate is multiplied by at each step.

Steps count from 0 to N - 1; W of them warm up. While ``t < W`` every schedule gives
``(t + 1) / W``. After that, with ``p = (t - W) / (N - W)``, the part of the rest that is done:

==========  ==========================================================================
constant    1
linear      1 - p
cosine      (1 + cos(pi * p)) / 2
wsd         1, then down in a straight line over the last fifth of all steps: with
            D = max(1, N // 5) it is (N - t) / D where t > N - D
==========  ==========================================================================

The last three reach 0 at step N, one past the last. WSD (warm-up, stable, decay) is
https://arxiv.org/abs/2404.06395.
"""

import math
from collections.abc import Callable

WSD_DECAY_DIVISOR = 5


def multiplier(schedule: str, num_steps: int, lr_warmup_steps: int) -> Callable[[int], float]:
    """Give the function from a step to its multiplier, as torch's LambdaLR takes it.

    >>> [multiplier("linear", 4, 2)(step) for step in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    after_warmup = SCHEDULES[schedule]

    def at_step(step: int) -> float:
        if step < lr_warmup_steps:
            return (step + 1) / lr_warmup_steps
        return after_warmup(step, num_steps, lr_warmup_steps)

    return at_step


def _constant(step: int, num_steps: int, lr_warmup_steps: int) -> float:
    return 1.0


def _linear(step: int, num_steps: int, lr_warmup_steps: int) -> float:
    return 1.0 - _part_done(step, num_steps, lr_warmup_steps)


def _cosine(step: int, num_steps: int, lr_warmup_steps: int) -> float:
    return (1.0 + math.cos(math.pi * _part_done(step, num_steps, lr_warmup_steps))) / 2.0


def _wsd(step: int, num_steps: int, lr_warmup_steps: int) -> float:
    decay_steps = max(1, num_steps // WSD_DECAY_DIVISOR)
    return min(1.0, max(0.0, (num_steps - step) / decay_steps))


def _part_done(step: int, num_steps: int, lr_warmup_steps: int) -> float:
    return min(1.0, (step - lr_warmup_steps) / max(1, num_steps - lr_warmup_steps))


SCHEDULES = {"constant": _constant, "linear": _linear, "cosine": _cosine, "wsd": _wsd}
