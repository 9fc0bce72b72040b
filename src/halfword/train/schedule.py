"""Learning-rate schedules: what the peak learning rate is multiplied by at each step.

Steps count from 0 to N - 1; W of them warm up. While ``t < W`` every schedule gives
``start + (1 - start) * r``, where ``r`` rises as ``(t + 1) / W`` (linear) or as
``ln(t + 2) / ln(W + 1)`` (log). After that it gives ``end + (1 - end) * f``, where ``f`` with
``p = (t - W) / (N - W)``, the part of the rest that is done, is

==========  ==========================================================================
constant    1
linear      1 - p
cosine      (1 + cos(pi * p)) / 2
wsd         1, then down in a straight line over the last fifth of all steps: with
            D = max(1, N // 5) it is (N - t) / D where t > N - D
==========  ==========================================================================

The last three reach ``end`` at step N, one past the last. WSD (warm-up, stable, decay) is
https://arxiv.org/abs/2404.06395.
"""

import math
from collections.abc import Callable

WSD_DECAY_DIVISOR = 5


def multiplier(
    schedule: str,
    num_steps: int,
    lr_warmup_steps: int,
    warmup_type: str = "linear",
    start: float = 0.0,
    end: float = 0.0,
) -> Callable[[int], float]:
    """Give the function from a step to its multiplier, as torch's LambdaLR takes it.

    >>> [multiplier("linear", 4, 2)(step) for step in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    warmup, after_warmup = WARMUPS[warmup_type], SCHEDULES[schedule]

    def at_step(step: int) -> float:
        if step < lr_warmup_steps:
            return start + (1.0 - start) * warmup(step, lr_warmup_steps)
        return end + (1.0 - end) * after_warmup(step, num_steps, lr_warmup_steps)

    return at_step


def _rise_in_a_line(step: int, lr_warmup_steps: int) -> float:
    return (step + 1) / lr_warmup_steps


def _rise_as_log(step: int, lr_warmup_steps: int) -> float:
    return math.log(step + 2) / math.log(lr_warmup_steps + 1)


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


WARMUPS = {"linear": _rise_in_a_line, "log": _rise_as_log}
SCHEDULES = {"constant": _constant, "linear": _linear, "cosine": _cosine, "wsd": _wsd}
