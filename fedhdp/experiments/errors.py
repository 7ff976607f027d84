"""msgspec's validation errors as one line that names the field by its path, and the value."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

import msgspec

from fedhdp.errors import ConfigError, FedHDPError

_TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "a table",
    "array": "a list",
}


class FieldNames:
    """The names and the choices of structs' fields, for hints in error messages.

    Args:
        structs: All structs that a configuration may contain.
    """

    def __init__(self, structs: Iterable[Any]):
        fields = [field for struct in structs for field in msgspec.structs.fields(struct)]
        self.names = sorted({field.name for field in fields})
        self.choices = {field.name: choices for field in fields if (choices := _choices(field.type))}


def config_error(
    error: msgspec.ValidationError, raw: Any, kind: Any, fields: FieldNames, source: str = "", prefix: str = ""
) -> ConfigError:
    """Translate a validation error.

    Args:
        error: What ``msgspec.convert`` raised.
        raw: What it was to convert.
        kind: The type that it was to become.
        fields: The fields of the configuration.
        source: The file, for the beginning of the message.
        prefix: The path of ``raw`` in the configuration.

    Returns:
        The error, with the path of the field and its value.
    """
    complaint, _, place = str(error).partition(" - at `")
    path = _with_keys(place.removeprefix("key in ").lstrip("$.").rstrip("`"), str(error), raw, kind)
    table = _value_at(raw, path)
    path = _join(prefix, path)
    message, field, value = f"{path or 'the file'}: {complaint}", path, table
    cause = error.__cause__
    if isinstance(cause, FedHDPError) and cause.field is not None:  # from the struct's own checks
        field, value = _join(path, cause.field), cause.value
        message = f"{field}{str(cause).removeprefix(cause.field)}" if str(cause).startswith(cause.field) else str(cause)
    elif unknown := re.search(r"unknown field `(.*)`", complaint):
        field, value = _join(path, unknown[1]), table.get(unknown[1])
        message = f"unknown field {field} = {value!r}"
        if similar := [name for name in get_close_matches(unknown[1], fields.names, 1) if name != unknown[1]]:
            message += f"; did you mean {similar[0]}?"
    elif missing := re.search(r"missing required field `(.*)`", complaint):
        field, value = _join(path, missing[1]), None
        message = f"{field} is missing"
    elif complaint.startswith("Invalid enum value") and _last_name(path) in fields.choices:
        message = f"{path} must be one of {', '.join(fields.choices[_last_name(path)])}, got {value!r}"
    elif wrong := re.fullmatch(r"Expected `(.*)`, got `.*`", complaint):
        types = " or ".join(_TYPE_NAMES.get(name, name) for name in wrong[1].split(" | ") if name != "null")
        message = f"{path or 'the file'} must be {types}, got {value!r}"
    return ConfigError(f"{source}: {message}" if source else message, field or None, value)


def refuse_nul(raw: Any, source: str, path: str = "") -> None:
    """Refuse texts with a NUL, which no path and no name can have.

    Raises:
        ConfigError: If there is one among the values or keys.
    """
    items = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    for key, value in items:
        field = _join(path, str(key)) if isinstance(raw, dict) else path
        if any(isinstance(text, str) and "\0" in text for text in (key, value)):
            raise ConfigError(f"{source}: {field!r} must be without a NUL, got {value!r}", field, value)
        refuse_nul(value, source, field)


def _with_keys(path: str, message: str, raw: Any, kind: Any) -> str:
    """A path with the keys of tables, for which msgspec has ``[...]``: those whose entry alone gives the same error."""
    while "[...]" in path:
        before, _, after = path.partition("[...]")
        for key in _value_at(raw, before):
            single = copy.deepcopy(raw)
            entries = _value_at(single, before)
            for other in entries.keys() - {key}:
                del entries[other]
            try:
                msgspec.convert(single, kind)
            except msgspec.ValidationError as error:
                if str(error) == message:
                    raw, path = single, _join(before, key) + after
                    break
        else:
            return path
    return path


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path and field else path or field


def _last_name(path: str) -> str:
    return re.sub(r"\[\w+\]", "", path).rpartition(".")[2]


def _value_at(raw: Any, path: str) -> Any:
    """The value at a path such as ``groups[1].weight``."""
    value = raw
    for part in re.findall(r"[^.\[\]]+", path):
        value = (
            value[int(part)]
            if isinstance(value, list | tuple)
            else value.get(part)
            if isinstance(value, dict)
            else None
        )
    return value


def _choices(annotation: Any) -> list[str]:
    """The values of a literal type, also of an optional one."""
    arguments = [argument for argument in get_args(annotation) if argument is not type(None)]
    if get_origin(annotation) is Literal:
        return [repr(argument) for argument in arguments]
    return [choice for argument in arguments for choice in _choices(argument)]
