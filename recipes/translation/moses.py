"""Text from the tokens of Moses' tokenizer, in which published BPE files are written: `it &apos;s 5 @-@ fold .`"""

import re

_ESCAPES = {
    "&apos;": "'", "&quot;": '"', "&#124;": "|", "&lt;": "<", "&gt;": ">", "&#91;": "[", "&#93;": "]", "&amp;": "&",
}  # fmt: skip
_ESCAPED = re.compile("|".join(map(re.escape, _ESCAPES)))
_JOINED = re.compile(r" @([-/])@ ")
_LEFTWARD = re.compile(r" ([.,;:!?%)\]}»“”…]+)(?= |$)")
_RIGHTWARD = re.compile(r"(?:(?<=^)|(?<= ))([(\[{¿¡«„]) ")
_CONTRACTED = re.compile(r"(?<=\w) ('(?:s|m|d|t|ll|re|ve))(?=\W|$)", re.IGNORECASE)


def detokenize(tokens: str) -> str:
    """Undoes escapes, joins what was split, moves punctuation to its word; every other straight quote closes."""
    text = _ESCAPED.sub(lambda found: _ESCAPES[found[0]], tokens.strip())
    text = _JOINED.sub(r"\1", text)
    text = _quoted(text)
    text = _RIGHTWARD.sub(r"\1", text)
    text = _LEFTWARD.sub(r"\1", text)
    text = _LEFTWARD.sub(r"\1", text)  # `) .`: the first has joined, the second sees it now
    return _CONTRACTED.sub(r"\1", text)


def _quoted(text: str) -> str:
    words: list[str] = []
    opened = glue = False
    for token in text.split(" "):
        if token == '"' and opened and words:
            words[-1] += token
            opened = False
        elif token == '"':
            words.append(token)
            opened = glue = True
        elif glue:
            words[-1] += token
            glue = False
        else:
            words.append(token)
    return " ".join(words)
