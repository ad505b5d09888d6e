"""Wikipedia's markup as plain paragraphs: templates, tables, references, files and headings go, words stay."""

import html
import re
from collections.abc import Collection

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_EMPTY_TAG = re.compile(r"<\s*(ref|references|br|hr|nowiki)\b[^<>]*/\s*>", re.IGNORECASE)
_DROPPED_TAG = re.compile(
    r"<\s*(ref|math|gallery|timeline|table|score|syntaxhighlight|source|code|pre|chem|imagemap)\b[^<>]*>.*?<\s*/\s*\1\s*>",
    re.DOTALL | re.IGNORECASE,
)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_LINK = re.compile(r"\[\[([^\[\]|]*)(?:\|([^\[\]]*))?\]\]")
_OUTER_LINK = re.compile(r"\[(?:https?:)?//[^\s\]]+\s*([^\]]*)\]")
_QUOTES = re.compile(r"'{2,}")
_SWITCH = re.compile(r"__[A-Z]+__")
_HEADING = re.compile(r"^\s*=+.*=+\s*$")
_LIST_SIGNS = "*#:; \t"
NAMESPACES = ("file", "image", "category", "media", "template")
"""Names that work in every wiki; one in another language has its own beside them."""


def paragraphs(markup: str, *, least_words: int = 5, namespaces: Collection[str] = NAMESPACES) -> list[str]:
    """The text of an article, a paragraph an entry; those of fewer words (captions, leftovers) are left out.

    Links into `namespaces`, which are in lower case, are no words of the text.
    """
    text = _COMMENT.sub("", markup)
    text = _EMPTY_TAG.sub(" ", text)
    text = _DROPPED_TAG.sub(" ", text)
    text = without_nested(text, "{{", "}}")
    text = without_nested(text, "{|", "|}")
    text = _linked_words(text, namespaces)
    text = _OUTER_LINK.sub(r"\1", text)
    text = _QUOTES.sub("", _SWITCH.sub("", text))
    text = html.unescape(_TAG.sub(" ", html.unescape(text)))
    found = []
    for line in text.splitlines():
        if _HEADING.match(line) or line.lstrip().startswith(("|", "!", "{", "}")):
            continue
        words = line.strip(_LIST_SIGNS).split()
        if len(words) >= least_words:
            found.append(" ".join(words))
    return found


def without_nested(text: str, opening: str, closing: str) -> str:
    """The text without what stands between the signs, also where they stand inside each other.

    An opening without an end takes nothing with it: half a template in an article must not swallow the rest.
    """
    kept, depth, start = [], 0, 0
    begins: list[int] = []
    for match in re.finditer(f"{re.escape(opening)}|{re.escape(closing)}", text):
        if match[0] == opening:
            if depth == 0:
                kept.append(text[start : match.start()])
            begins.append(match.start())
            depth += 1
        elif depth:
            begins.pop()
            depth -= 1
            start = match.end()
    if depth:
        start = begins[0] + len(opening)
    return "".join([*kept, text[start:]])


def _linked_words(text: str, namespaces: Collection[str]) -> str:
    """`[[target|shown]]` becomes what is shown; links to files and categories go, their captions with them."""

    def shown(match: re.Match[str]) -> str:
        space, colon, _ = match[1].strip().lower().removeprefix(":").partition(":")
        if colon and space.strip() in namespaces:
            return ""
        return match[2].rpartition("|")[2] if match[2] is not None else match[1]

    before = None
    while before != text:  # from the inside out: captions have links of their own
        before, text = text, _LINK.sub(shown, text)
    return text
