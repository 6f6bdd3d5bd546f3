"""Objects as YAML: the same objects, the same bytes.

Owns: the text. Does not own: the objects (`manifest`). The one door to PyYAML for writing.
Invariants: no anchors, no wrapped lines, keys in the order of the objects; whatever any YAML reader
could take for a number stands in quotes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from stepfast.errors import ConfigError
from stepfast.k8s.pods import Object

_LIKE_A_NUMBER = re.compile(r"[-+.]?[0-9][0-9_.eExXoO+-]*[0-9a-fA-F]*")


def as_yaml(objects: Sequence[Object]) -> str:
    """One document for each object. Raises ConfigError where PyYAML is not installed."""
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("YAML needs PyYAML: pip install 'stepfast[k8s]'") from error

    class Dumper(yaml.SafeDumper):
        """Plain YAML that reads the same in versions 1.1 and 1.2."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
            return super().increase_indent(flow, False)

    def text_node(dumper: Any, text: str) -> Any:
        style = '"' if _LIKE_A_NUMBER.fullmatch(text) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, text_node)
    documents = [
        yaml.dump(
            item,
            Dumper=Dumper,
            sort_keys=False,
            default_flow_style=False,
            allow_unicode=False,
            width=1 << 20,
        )
        for item in objects
    ]
    return "".join(f"---\n{document}" for document in documents)
