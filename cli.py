"""Runs the command line from a checkout: `python cli.py fit recipe=vgg16`."""

from pl_pipe.cli import main

if __name__ == "__main__":
    main()
