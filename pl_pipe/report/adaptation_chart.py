"""What other traffic did to a training, and what was done about it: time by step, votes, switches. -> PNG."""

from collections.abc import Sequence
from pathlib import Path

from pl_pipe.report.charts import BACKWARD, FORWARD, figure
from pl_pipe.report.steps_seen import Switch, WatchedStep


def draw_adaptation(steps: Sequence[WatchedStep], switches: Sequence[Switch], path: Path, *, ranks: int) -> None:
    """Above the time of each step, below how many ranks voted; a line where the topology changed."""
    numbers = [one.step for one in steps]
    with figure(path, width=8.0, height=4.2) as drawn:
        times, votes = drawn.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        times.plot(numbers, [one.seconds for one in steps], ".-", color=FORWARD)
        times.set(ylabel="step, s", ylim=(0, None), title="steps, votes and switches of topology")
        votes.step(numbers, [one.votes for one in steps], where="mid", color=BACKWARD)
        votes.axhline(ranks / 2, color="grey", linewidth=0.8, linestyle=":")
        votes.set(xlabel="step", ylabel="votes", ylim=(0, ranks + 0.2))
        for switch in switches:
            for panel in (times, votes):
                panel.axvline(switch.step, color="black", linewidth=0.8)
            times.annotate(
                switch.text, (switch.step, times.get_ylim()[1]), rotation=90, va="top", ha="right", fontsize=8
            )
