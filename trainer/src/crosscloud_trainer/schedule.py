"""When things happen in a run: how many steps it has, which step ends a window, the learning rate of each.
Pure.
"""

import math


def steps_for(tokens: int, tokens_per_step: int) -> int:
    """Inner steps that see at least `tokens` tokens of all replicas. The last window may be a shorter one."""
    return max(1, -(-tokens // tokens_per_step))


def ends_window(step: int, inner_steps: int) -> bool:
    """Whether a round follows inner step number `step`, the first of which is 1."""
    return step % inner_steps == 0


def warmup_cosine(step: float, warmup: int, total: int, floor: float) -> float:
    """Factor of the learning rate at inner step `step` from 0: linear over `warmup` steps, then a cosine down
    to `floor`. `step` lies between two steps where a run goes on with other ones.

    The schedule of Loshchilov and Hutter (SGDR, 2017) without restarts.
    """
    if step < warmup:
        return min(1.0, (step + 1) / warmup)
    if step >= total:
        return floor
    progress = (step - warmup) / max(1, total - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
