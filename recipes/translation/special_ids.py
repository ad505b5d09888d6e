"""The first ids of every vocabulary, which stand for no word; network, batches and vocabularies agree on them here."""

PAD, UNKNOWN, BEGIN, END = range(4)
