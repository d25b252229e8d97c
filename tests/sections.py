"""Options of a method or a term by their own names, wherever they are in its constructor."""

from dataclasses import fields

from fl_lightning.schema import options


def sectioned(cls, **given):
    """Constructor arguments of `cls`: each option inside the dataclass that has it."""
    arguments = dict(given)
    for section, kind in options(cls).items():
        own = {field.name for field in fields(kind)} & arguments.keys() if kind else ()
        if own:
            arguments[section] = kind(**{name: arguments.pop(name) for name in own})
    return arguments
