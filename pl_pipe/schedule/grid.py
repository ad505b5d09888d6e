"""Draws programs as the papers' figures do: a row a rank, a column a unit of time. programs -> *grid* -> people, tests.

    stage 0  rank 0 │ F0 F1 .  .  B0 B0 F2 B1 B1
    stage 1  rank 1 │ .  F0 B0 B0 F1 B1 B1

Messages take no time in it; the simulator gives them their cost.
"""

from pl_pipe.errors import ScheduleError
from pl_pipe.schedule.programs import Programs
from pl_pipe.schedule.walk import walk


def render(programs: Programs, forward: int = 1, backward: int = 2, *, columns: int | None = None) -> str:
    """A text picture: `F0` and `B0` over `forward` and `backward` columns, `.` where a rank idles.

    `columns` cuts a long picture and says so by `…`.
    """
    if forward < 1 or backward < 1:
        raise ScheduleError(f"forward={forward}, backward={backward}; a picture takes whole columns, 1 or more")
    rows: dict[int, list[str]] = {rank: [] for rank in programs.by_rank}
    for step in walk(programs, forward=forward, backward=backward):
        row = rows[step.rank]
        row.extend("." for _ in range(step.start - len(row)))
        row.extend(str(step.action) for _ in range(step.end - step.start))
    width = max((len(cell) for row in rows.values() for cell in row), default=1)
    last = len(programs.stages) - 1
    lines = []
    for rank, row in rows.items():
        name = f"stage {programs.stage_of[rank]:<{len(str(last))}}  rank {rank:<{len(str(max(rows)))}}"
        shown = row if columns is None else row[:columns]
        cut = " …" if len(shown) < len(row) else ""
        lines.append(f"{name} │ {' '.join(cell.ljust(width) for cell in shown).rstrip()}{cut}".rstrip())
    return "\n".join(lines)
