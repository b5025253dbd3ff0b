"""Learning-rate schedules: pure functions of the number of updates done so far, so nothing about them is ever saved."""

from math import cos, pi

from sirara.errors import ConfigError


def lr_at(
    update: int, *, name: str, lr: float, total: int, warmup_steps: int, min_lr_ratio: float, decay_steps: int
) -> float:
    """The learning rate of update number `update` (0 is the first).

        constant   /‾‾‾‾‾‾     linear   /\\       cosine   /‾\\_      wsd   /‾‾‾‾\\   (decay over the last decay_steps)

    Args:  total: updates until the schedule ends; afterwards the rate stays at its last value.
    """
    if update < warmup_steps:
        return lr * (update + 1) / warmup_steps
    floor = lr * min_lr_ratio
    if name == "constant":
        return lr
    if name == "wsd":
        begin = max(warmup_steps, total - decay_steps)
        done = (update - begin) / max(1, total - begin)
        return lr if update < begin else floor + (lr - floor) * (1 - min(1.0, done))
    done = min(1.0, (update - warmup_steps) / max(1, total - warmup_steps))
    if name == "linear":
        return floor + (lr - floor) * (1 - done)
    if name == "cosine":
        return floor + (lr - floor) * 0.5 * (1 + cos(pi * done))
    raise ConfigError(f"train.lr_schedule.name={name}: use constant, linear, cosine or wsd")
