"""Lightning callbacks, usable with any strategy and without the command line."""
