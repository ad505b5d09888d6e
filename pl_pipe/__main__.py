"""`python -m pl_pipe` is `pl-pipe`."""

from pl_pipe.cli import main

if __name__ == "__main__":
    main()
