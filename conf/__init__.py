"""The choices of every configuration group, installed as `pl_pipe.conf` for Hydra to find."""
