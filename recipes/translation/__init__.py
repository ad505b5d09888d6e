"""GNMT, parallel text, and BLEU."""
