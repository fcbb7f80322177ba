"""JSON schemas whose values are short whatever is chosen, and who is one of their values; knows no grammar."""

from typing import Any

from hypothesis import strategies as st

LETTERS = 'ab "\\\n/{}[]é😀'


def schemas(depth: int) -> st.SearchStrategy[dict[str, Any]]:
    """Of any kind of value, nested so deep at most."""
    limits = st.tuples(st.integers(-50, 999), st.integers(-50, 999)).map(sorted)
    leaves = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.integers(0, 4).map(lambda most: {"type": "string", "maxLength": most}),
        limits.map(lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[1]}),
        st.lists(st.text(LETTERS, max_size=4) | st.integers(-9, 9), min_size=1, max_size=3).map(
            lambda values: {"enum": values}
        ),
    )
    if not depth:
        return leaves
    inner = schemas(depth - 1)
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda parts: {"type": "array", "items": parts[0], "minItems": parts[1], "maxItems": parts[1] + parts[2]}
    )
    return leaves | arrays | objects(inner)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(st.text(LETTERS, min_size=1, max_size=3), inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is one of a schema of these forms."""
    if "enum" in schema:
        return any(type(value) is type(one) and value == one for one in schema["enum"])
    match schema["type"]:
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "array":
            fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return fits and all(is_valid(item, schema["items"]) for item in value)
        case _:
            properties = schema["properties"]
            fits = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(properties)
            return fits and all(is_valid(item, properties[name]) for name, item in value.items())
