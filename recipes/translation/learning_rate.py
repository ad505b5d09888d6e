"""The learning rate of the original's GNMT: an exponential warm-up, a plateau, then a decay in steps."""

LR_POLICIES = ("gnmt", "polynomial")
"""The one here, and what PipeDream's experiments name instead: a decay by whole epochs, without a warm-up."""


def gnmt_lr_factor(
    step: int, *, total_steps: int, warmup_steps: int, decay_from: float, decay_times: int, decay_factor: float
) -> float:
    """What the base rate is multiplied by at optimizer step `step`, counted from 0.

    It rises from 0.01 to 1 over the warm-up (at most half of the run); after the share `decay_from` of the run it is
    multiplied by `decay_factor` `decay_times` times, at equal distances.

        1 ┤    ╭───────╮
          │   ╱        ╰──╮
          │ ╱             ╰──╮
        0 ┼──────────────────────
    """
    warmup = min(warmup_steps, total_steps // 2)
    if step < warmup:
        return float(0.01 ** ((warmup - step) / warmup))
    first = max(warmup, round(decay_from * total_steps))
    if step < first or decay_times == 0:
        return 1.0
    interval = max(1, (total_steps - first) // decay_times)
    return float(decay_factor ** min((step - first) // interval + 1, decay_times))
