"""Shares of ports: by hand, against a brute-force filling of all flows at once, and what must always hold."""

from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pl_pipe.simulate.sharing import Flow, Sharing

Wish = tuple[float, tuple[int, int], float]
"""When a flow begins, on which ports, and how long it would take alone."""
Rates = list[tuple[float, dict[int, float]]]
"""From which date on, by flow."""


def run(wishes: list[Wish]) -> tuple[dict[int, float], Rates]:
    """When each flow ends, and all rates after every beginning and end."""
    sharing, ends_s, history = Sharing(), {}, []
    under_way: dict[int, Flow] = {}
    heap: list[tuple[float, int, int]] = []
    for number, (start_s, _, _) in enumerate(wishes):
        heappush(heap, (start_s, 0, number))
    while heap:
        now_s, ticket, number = heappop(heap)
        if ticket == 0:
            _, ports, alone_s = wishes[number]
            flow = under_way[number] = Flow(ports, alone_s, lambda _: None)
            changed = sharing.begin(now_s, flow)
        elif number in under_way and under_way[number].ticket == ticket:
            changed = sharing.end(now_s, under_way.pop(number))
            ends_s[number] = now_s
        else:
            continue
        for number, flow in under_way.items():
            if flow in changed:
                flow.ticket += 1
                heappush(heap, (flow.end_s, flow.ticket, number))
        history.append((now_s, {number: flow.rate for number, flow in under_way.items()}))
    return ends_s, history


def filled(flows: dict[int, tuple[int, int]]) -> dict[int, float]:
    """Max-min rates from their definition: raise all that can rise by the most that fits, again and again."""
    rates = dict.fromkeys(flows, 0.0)
    rising = set(flows)
    while rising:
        ports = {port for number in rising for port in flows[number]}
        room = {
            port: (1 - sum(rates[n] for n in flows if port in flows[n])) / sum(port in flows[n] for n in rising)
            for port in ports
        }
        step = min(room.values())
        for number in rising:
            rates[number] += step
        full = {port for port in ports if room[port] <= step + 1e-12}
        rising -= {number for number in rising if full.intersection(flows[number])}
    return rates


def test_flows_that_meet_have_half_each() -> None:
    ends_s, _ = run([(0.0, (0, 1), 2.0), (1.0, (0, 3), 2.0), (1.0, (4, 5), 1.0)])
    assert ends_s == pytest.approx({0: 3.0, 1: 4.0, 2: 2.0})


def test_what_one_cannot_use_the_others_have() -> None:
    """0, 1 and 2 leave by port 0, a third each; 3 meets 2 at port 9 and has the two thirds that 2 leaves there."""
    _, history = run([(0.0, (0, 1), 3.0), (0.0, (0, 3), 3.0), (0.0, (0, 9), 3.0), (0.0, (2, 9), 3.0)])
    assert history[3][1] == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3, 3: 2 / 3})


def test_the_end_of_a_flow_is_felt_by_those_that_never_met_it() -> None:
    """0, 1 and 2 share port 0, a third each; 2 and 3 meet at port 1. When 0 and 1 end, 2 rises, and 3 sinks to half."""
    _, history = run([(0.0, (0, 5), 1.0), (0.0, (0, 7), 1.0), (0.0, (0, 1), 9.0), (0.0, (2, 1), 9.0)])
    assert history[3] == (0.0, pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3, 3: 2 / 3}))
    assert history[5] == (pytest.approx(3.0), pytest.approx({2: 0.5, 3: 0.5}))
    assert history[6] == (pytest.approx(3.0 + (9.0 - 2.0) * 2), pytest.approx({2: 1.0}))


wishes_ = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 5),
        st.tuples(st.sampled_from([0, 2, 4, 6]), st.sampled_from([1, 3, 5, 7])),
        st.sampled_from([1.0, 2.0]) | st.floats(0.01, 5),
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=200, deadline=None)
@given(wishes_)
def test_rates_are_max_min_fair_at_all_times(wishes: list[Wish]) -> None:
    """That is: no port has more than it can take, and every flow is on a full one where none is faster."""
    ends_s, history = run(wishes)
    assert sorted(ends_s) == list(range(len(wishes)))
    moved = dict.fromkeys(ends_s, 0.0)
    for (start_s, rates), (end_s, _) in zip(history, [*history[1:], (max(ends_s.values()), {})], strict=True):
        ports = {number: wishes[number][1] for number in rates}
        assert rates == pytest.approx(filled(ports), rel=1e-9)
        for port in range(8):
            assert sum(rate for number, rate in rates.items() if port in ports[number]) <= 1 + 1e-9
        for number, rate in rates.items():
            moved[number] += rate * (end_s - start_s)
    assert moved == pytest.approx({number: alone_s for number, (_, _, alone_s) in enumerate(wishes)}, rel=1e-6)
    assert run(wishes) == (ends_s, history)
