"""A progress bar that suits where it is shown: live on a terminal, a few lines in a file."""

import sys

from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar


def progress_bar(refresh_rate: int = 1, log_refresh_rate: int = 20) -> ProgressBar:
    """Rich's bar on a terminal; elsewhere tqdm's, updated every `log_refresh_rate` batches."""
    if sys.stderr.isatty() and sys.stdout.isatty():
        return RichProgressBar(refresh_rate=refresh_rate, leave=True)
    return TQDMProgressBar(refresh_rate=log_refresh_rate, leave=True)
