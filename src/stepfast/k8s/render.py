"""Objects as YAML: the same objects, the same bytes.

Owns: the text. Does not own: the objects (`manifest`). The one door to PyYAML for writing.
Invariants: no anchors, no wrapped lines, keys in the order of the objects; whatever any YAML reader
could take for a number or a truth stands in quotes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from stepfast.k8s.pods import Object

_LIKE_A_NUMBER = re.compile(r"[-+.]?[0-9][0-9_.eExXoO+-]*[0-9a-fA-F]*")

_LIKE_A_TRUTH = frozenset("yYnN")  # to Go's readers of YAML 1.1; PyYAML knows the longer words


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML ships no types
    """Plain YAML that reads the same in versions 1.1 and 1.2."""

    def ignore_aliases(self, data: Any) -> bool:
        """Never an anchor."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        """Lists stand below their key."""
        return super().increase_indent(flow, False)


def _text_node(dumper: Any, text: str) -> Any:
    is_plain = _LIKE_A_NUMBER.fullmatch(text) is None and text not in _LIKE_A_TRUTH
    style = None if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_node)


def as_yaml(objects: Sequence[Object]) -> str:
    """One document for each object."""
    documents = [
        yaml.dump(
            item,
            Dumper=_Dumper,
            sort_keys=False,
            default_flow_style=False,
            allow_unicode=False,
            width=1 << 20,
        )
        for item in objects
    ]
    return "".join(f"---\n{document}" for document in documents)
