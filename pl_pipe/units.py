"""Numbers as people read them: durations, counts, rates."""


def format_duration(seconds: float) -> str:
    """`75.2` -> `1 min 15 s`; under a minute one decimal is kept."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def format_count(number: float) -> str:
    """`138_357_544` -> `138.4 M`; whole numbers under a thousand stay whole."""
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f} {sign}"
    return f"{number:g}"


def format_bytes(size: float) -> str:
    """`553_430_176` -> `553.4 MB`."""
    for scale, sign in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(size) >= scale:
            return f"{size / scale:.1f} {sign}"
    return f"{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """`0.00215` -> `2.15 ms`: three digits, for times that layers and messages take."""
    for scale, sign in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {sign}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"
