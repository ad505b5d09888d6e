"""A made-up language in English words: endless documents by rule, from which masked words and order can be learnt.

A document is about one trade. Its sentences have a few shapes; who acts decides the tool, and the tool decides what is
made, so that a masked word follows from its neighbours. The words of one trade hardly occur in another's, so that a
second segment from elsewhere can be told.
"""

from collections.abc import Iterator

import numpy as np

TRADES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "garden": (("gardener", "spade", "rose"), ("farmer", "plough", "wheat"), ("shepherd", "crook", "wool")),
    "harbour": (("sailor", "rope", "sail"), ("fisher", "net", "herring"), ("pilot", "lamp", "course")),
    "kitchen": (("cook", "ladle", "soup"), ("baker", "oven", "bread"), ("brewer", "barrel", "beer")),
    "workshop": (("joiner", "saw", "table"), ("potter", "wheel", "bowl"), ("smith", "hammer", "anchor")),
    "studio": (("painter", "brush", "portrait"), ("sculptor", "chisel", "statue"), ("weaver", "loom", "carpet")),
    "school": (("teacher", "chalk", "lesson"), ("scribe", "pen", "letter"), ("singer", "harp", "song")),
}
"""Places, and who works there with what to make what."""
TIMES = ("morning", "noon", "evening", "night")
SHAPES = (
    "in the {time} the {who} takes the {tool} to the {place} .",
    "the {who} of the {place} makes the {thing} with the {tool} .",
    "with the {tool} the {who} works on the {thing} until {time} .",
    "the {thing} of the {who} stays in the {place} .",
)


def documents(count: int, *, seed: int) -> Iterator[list[str]]:
    """Sentences of `count` documents."""
    random = np.random.default_rng(seed)
    places = list(TRADES)
    for _ in range(count):
        place = places[random.integers(len(places))]
        sentences = []
        for _ in range(random.integers(4, 9)):
            who, tool, thing = TRADES[place][random.integers(len(TRADES[place]))]
            shape, time = SHAPES[random.integers(len(SHAPES))], TIMES[random.integers(len(TIMES))]
            sentences.append(shape.format(who=who, tool=tool, thing=thing, place=place, time=time))
        yield sentences
