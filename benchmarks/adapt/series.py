"""Numbers from what runs have noted by step. rows -> *series* -> tables.

    step    38   39   40   41   42   43   44   45        traffic since step 40, an alarm after step 43:
    rate    21   21   12   12   12   12   16   20        detected within 4 steps; recovered within 6
                      └─ onset        └─ alarm

Rows have `step`, `samples_per_s`, `traffic` (1 while it was there) and `event`, which is what the policy did after it.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Row = Mapping[str, Any]

SMOOTH = 3
"""Steps whose median counts as the throughput: single steps differ for many reasons."""
_ALARM = re.compile(r"step (\d+): \d+ of \d+ ranks say that their links are slow; .*; (\S+ (?:-> \S+|stays))$")
_RACE = re.compile(r"step (\d+): steps by topology: .*; (\S+ -> \S+)$")
_REVERT = re.compile(r"step (\d+): (\S+) is as quick again as it was")


def events_of(log: str) -> dict[int, str]:
    """From a run's fit.log: `alarm: star -> ring`, `alarm: star stays`, `by steps: ring -> clique`, `back to star`,
    by the step after which.

    The policy counts the steps that have been made; rows are numbered from 0, so the last of them has one less.
    """
    found = {}
    for line in log.splitlines():
        if alarm := _ALARM.search(line.rstrip()):
            found[int(alarm[1]) - 1] = f"alarm: {alarm[2]}"
        elif race := _RACE.search(line.rstrip()):
            found[int(race[1]) - 1] = f"by steps: {race[2]}"
        elif revert := _REVERT.search(line):
            found[int(revert[1]) - 1] = f"back to {revert[2]}"
    return found


def onset(rows: Sequence[Row]) -> int | None:
    """The first step with traffic."""
    return next((row["step"] for row in rows if row["traffic"]), None)


def alarm_step(rows: Sequence[Row]) -> int | None:
    """The first alarm while there was traffic."""
    return next((row["step"] for row in rows if row["traffic"] and row["event"].startswith("alarm")), None)


def detected_within(rows: Sequence[Row]) -> float:
    """Steps from the first one with traffic to the alarm, both counted; infinite without one."""
    began, alarm = onset(rows), alarm_step(rows)
    return math.inf if began is None or alarm is None else alarm - began + 1


def recovered_within(rows: Sequence[Row], wanted: float) -> float:
    """Steps from the first one with traffic to the first one after the alarm, both counted, from which the median of
    three with traffic is as wanted, as is its own throughput; infinite if there is none, or no alarm."""
    began, alarm = onset(rows), alarm_step(rows)
    if began is None or alarm is None:
        return math.inf
    after = [row for row in rows if row["traffic"] and row["step"] > alarm]
    for place in range(len(after) - SMOOTH + 1):
        rates = [row["samples_per_s"] for row in after[place : place + SMOOTH]]
        if min(rates[0], statistics.median(rates)) >= wanted:
            return after[place]["step"] - began + 1
    return math.inf


def reverted_within(rows: Sequence[Row]) -> float:
    """Steps from the first one without traffic again to the way back, both counted."""
    last = max((row["step"] for row in rows if row["traffic"]), default=None)
    if last is None:
        return math.inf
    backs = [row["step"] for row in rows if row["step"] > last and row["event"].startswith("back")]
    return backs[0] - last if backs else math.inf


def settled_with_traffic(rows: Sequence[Row]) -> float:
    """The median of the last two thirds of the steps with traffic."""
    found = [row["samples_per_s"] for row in rows if row["traffic"]]
    return statistics.median(found[len(found) // 3 :]) if found else math.nan


def before_traffic(rows: Sequence[Row], *, first: int = 10) -> float:
    """The median of the steps before it came, without the first ones."""
    began = onset(rows)
    found = [row["samples_per_s"] for row in rows if first <= row["step"] and (began is None or row["step"] < began)]
    return statistics.median(found) if found else math.nan


def switches(rows: Sequence[Row]) -> int:
    """How often the topology changed."""
    return sum("->" in row["event"] or row["event"].startswith("back") for row in rows)


def without_cause(rows: Sequence[Row]) -> list[str]:
    """Alarms in steps without traffic, with their steps."""
    return [
        f"step {row['step']}: {row['event']}" for row in rows if row["event"].startswith("alarm") and not row["traffic"]
    ]


def first_reaching(points: Sequence[tuple[float, float]], wanted: float) -> float:
    """Seconds until the accuracy was first as wanted; infinite if it never was.

    Args:
        points: seconds and accuracies, in their order.
    """
    return next((seconds for seconds, accuracy in points if accuracy >= wanted), math.inf)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower one, the median and the upper one."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, middle, upper


def added(times_s: Mapping[str, Sequence[float]], plain: str) -> dict[str, list[float]]:
    """By how much each kind of step took longer than the plain one of the same round, as a share."""
    return {
        name: [one_s / plain_s - 1 for one_s, plain_s in zip(seconds, times_s[plain], strict=False)]
        for name, seconds in times_s.items()
    }


def worker_changes(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """When the number of workers changed, and for how long nothing was trained: from the end of the last step of so
    many to that of the first one of others that has a time, which counts the steps between (a worker's first has none).
    """
    return [
        {
            "after_step": before["step"],
            "workers": f"{before['workers']} -> {after['workers']}",
            "pause_s": after["ended_at_s"] - before["ended_at_s"],
            "steps_included": after["step"] - before["step"],
        }
        for before, after in pairwise(rows)
        if before["workers"] != after["workers"]
    ]
