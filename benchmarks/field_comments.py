"""What the page of the Python API says of fields: the comments beside them, which `hone settings` prints too.

An extension of Griffe, which reads the code for mkdocstrings; `mkdocs.yml` names it.
"""

import re
from typing import Any

from griffe import Class, Docstring, Extension

from hone.commands.reference import field_comments

NOT_A_DEFAULT = re.compile(r"ABSENT|field\(.*|.*\[.*|.*\n.*", re.DOTALL)


class FieldComments(Extension):
    """Adds a list of the commented fields to the docstring of each class."""

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Google's form of it, which mkdocstrings shows as a table."""
        told = field_comments(cls.source) if cls.source else {}
        rows = [
            f"    {name}: {sentence(told[name], cls.attributes[name].value)}" for name in cls.attributes if name in told
        ]
        if not rows:
            return
        above = cls.docstring.value if cls.docstring else ""
        cls.docstring = Docstring("\n".join([above, "", "Attributes:", *rows]), parent=cls, parser="google")


def sentence(comment: str, value: object) -> str:
    """The comment as a sentence, and the default where it is short enough to be read.

    >>> sentence("how many", "100"), sentence("whose own", "field(default_factory=dict)")
    ('how many. Default: `100`.', 'whose own.')
    """
    text = comment if comment[-1] in ".?!:" else f"{comment}."
    shown = "" if value is None else str(value)
    return text if not shown or NOT_A_DEFAULT.fullmatch(shown) else f"{text} Default: `{shown}`."
