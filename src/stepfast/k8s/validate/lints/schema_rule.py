"""Rule `schema`, as far as it needs no schema: every document is an object of Kubernetes.

Owns: what all objects have. Does not own: fields (`schemas`).
"""

from __future__ import annotations

from collections.abc import Iterator

from stepfast.k8s.validate.scene import Hit, Scene


def is_object(scene: Scene) -> Iterator[Hit]:
    """It is a mapping with a kind, a version and a name."""
    for document in scene.documents:
        root = document.root
        if not isinstance(root.value, dict):
            yield Hit(root, "this is no object of Kubernetes", "write apiVersion, kind, metadata")
            continue
        for name in ("apiVersion", "kind"):
            if not root.at(name).text:
                yield Hit(root.at(name), f"the object does not say its {name}", f"add {name}")
