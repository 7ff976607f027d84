"""Let the reference know the parameters of structs and named tuples: their fields, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe

BASES = ("Struct", "NamedTuple")


class FieldsAsParameters(griffe.Extension):
    """Gives every class with fields an ``__init__`` that takes them."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Visit a loaded package.

        Args:
            pkg: The package.
        """
        for cls in list(_classes(pkg)):
            fields = _fields(cls)
            if fields and "__init__" not in cls.members:
                cls.set_member("__init__", _init(fields))


def _classes(module: griffe.Object) -> Iterator[griffe.Class]:
    for member in module.members.values():
        if member.is_alias:
            continue
        if member.is_class:
            yield member
        if member.is_module or member.is_class:
            yield from _classes(member)


def _fields(cls: griffe.Class) -> dict[str, griffe.Attribute]:
    """The fields of a struct or a named tuple, those of its base first; nothing for other classes."""
    names = [str(base).rpartition(".")[2] for base in cls.bases]
    bases = [base for base in cls.resolved_bases if base.is_class]
    inherited: dict[str, griffe.Attribute] = {}
    for base in bases:
        inherited |= _fields(base)
    if not inherited and not any(name in BASES for name in names):
        return {}
    own = {
        name: member
        for name, member in cls.members.items()
        if member.is_attribute and member.annotation is not None and "property" not in member.labels
    }
    return inherited | own


def _init(fields: dict[str, griffe.Attribute]) -> griffe.Function:
    kind = griffe.ParameterKind.positional_or_keyword
    parameters = [
        griffe.Parameter(name, annotation=field.annotation, kind=kind, default=field.value)
        for name, field in fields.items()
    ]
    self_parameter = griffe.Parameter("self", kind=kind)
    return griffe.Function("__init__", parameters=griffe.Parameters(self_parameter, *parameters), returns="None")
