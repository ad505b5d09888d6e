"""Workloads and ways to train variants, by the names that rows have of them. Drivers need no torch."""

WORKLOADS = ("pointnet", "dcgan_d", "resnet18", "mobilenet", "transformer", "bert")
SERIAL, SERIAL_COMPILED = "serial eager", "serial compiled"
VMAP, PLAIN_BRANCHES = "vmap", "branches of plain models"
MPS = "mps"
PLAIN_LIGHTNING = "plain lightning"
IN_ONE_PROCESS = (SERIAL, SERIAL_COMPILED, VMAP, PLAIN_BRANCHES)
"""Loops over plain models (peers.py)."""
PEERS = (SERIAL, SERIAL_COMPILED, MPS, VMAP, PLAIN_BRANCHES)
"""What fusion is measured against."""
ONE_MODEL = (SERIAL, SERIAL_COMPILED, PLAIN_LIGHTNING)
"""Train one; for any number of models, one after another, the rate is the same."""
AUTO, AUTO_TUNED, AUTO_UNCOMPILED = "auto", "auto tuned", "auto uncompiled"
COMPILED = ("compiled branches", "compiled array")
FORCED = ("array", "model array", "one by one", "branches", "captured array", *COMPILED)
"""FusionStrategy as told, without a choice."""
ALL = (AUTO, AUTO_TUNED, AUTO_UNCOMPILED, *PEERS, PLAIN_LIGHTNING, *FORCED)
