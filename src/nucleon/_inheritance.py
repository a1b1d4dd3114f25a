"""What is said of a method does not hold for one that overrides it."""

from collections.abc import Mapping


def overridden(cls: type, fact: str, methods: tuple[str, ...]) -> bool:
    """Whether `cls` takes one of the methods from a class nearer than the one that says `fact`."""
    order = cls.__mro__

    def place(name: str) -> int:
        return next((i for i, kind in enumerate(order) if name in vars(kind)), len(order))

    return any(place(method) < place(fact) for method in methods)


class Said:
    """What a class says of its methods; another value where one of them is not the one it had.

    It is read of a class or an instance, and sees a method that was assigned to either. Its lookups
    are plain ones: torch's compiler traces them where a hook of `step` reads a fact.
    """

    def __init__(self, cls: type, fact: str, methods: tuple[str, ...], otherwise: object) -> None:
        order = cls.__mro__
        known = order[next(i for i, kind in enumerate(order) if fact in vars(kind)) :]
        self.value, self.otherwise = vars(known[0])[fact], otherwise
        self.methods = {
            name: next(vars(kind)[name] for kind in known if name in vars(kind)) for name in methods
        }

    def __get__(self, instance: object, owner: type) -> object:
        assigned: Mapping[str, object] = {} if instance is None else vars(instance)
        for name, had in self.methods.items():
            kind = next(kind for kind in owner.__mro__ if name in vars(kind))
            if name in assigned or vars(kind)[name] is not had:
                return self.otherwise
        return self.value
