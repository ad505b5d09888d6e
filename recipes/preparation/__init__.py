"""Data sets fetched, checked and unpacked: what `pl-pipe data prepare` does."""
