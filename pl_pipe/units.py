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
