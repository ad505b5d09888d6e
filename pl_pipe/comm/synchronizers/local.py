"""`local`: workers train on their own, and are averaged when all meet."""

from pl_pipe.comm.synchronizers.port import Rule


class Local(Rule):
    survives = True
