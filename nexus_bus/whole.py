"""Messages with every field written out: on the wire they leave out what holds its default, but a reader has to see it."""

from typing import Any

import msgspec


def whole(value: Any) -> Any:
    """The same with mappings in the place of Structs, defaults and tags included."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        tag = {config.tag_field: config.tag} if config.tag_field else {}
        return tag | {name: whole(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list | tuple) else value
