"""Settings of a package from configuration keys of the same names."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lowroll.config.section import Section

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


class Mirror(Generic[T]):
    """A package's settings from configuration keys of the same names.

    A field of the dataclass `settings` is in `given` (from the caller), in `default` (no key sets
    it), or in the first of `sections` that has its name. TypeError for any other field.
    """

    def __init__(
        self,
        settings: type[T],
        *sections: type[Section],
        given: tuple[str, ...] = (),
        default: tuple[str, ...] = (),
    ) -> None:
        names = [field.name for field in fields(settings) if field.init]
        unknown = {*given, *default} - {*names}
        if unknown:
            raise TypeError(f"{settings.__name__} has no field {', '.join(sorted(unknown))}")
        self.settings = settings
        self.sections = sections
        self.given = frozenset(given)
        self.source: dict[str, int] = {}
        for name in names:
            if name in given or name in default:
                continue
            having_key = [i for i, section in enumerate(sections) if name in section.model_fields]
            if not having_key:
                raise TypeError(f"{settings.__name__}.{name} is a key of none of its sections")
            self.source[name] = having_key[0]

    def __call__(self, *sections: Section, **given: Any) -> T:
        assert tuple(map(type, sections)) == self.sections and given.keys() == self.given
        values = {name: getattr(sections[i], name) for name, i in self.source.items()}
        return self.settings(**values, **given)
