"""The Python reference shows `int`, not `Annotated[int, Range(0), Flag(...)]`: griffe reads it, and calls this."""

from typing import Any

import griffe


class PlainTypes(griffe.Extension):
    """Annotations of fields without what stands in `Annotated` for ranges and flags."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        annotation = attr.annotation
        if isinstance(annotation, griffe.ExprSubscript) and annotation.canonical_name == "Annotated":
            parts = annotation.slice
            attr.annotation = parts.elements[0] if isinstance(parts, griffe.ExprTuple) else parts
