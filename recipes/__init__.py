"""Ready models and data sets, installed as `pl_pipe.recipes`: ordinary Lightning code that knows no strategy."""
