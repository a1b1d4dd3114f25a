"""What is said of a method does not hold for one that overrides it."""


def overridden(cls: type, fact: str, methods: tuple[str, ...]) -> bool:
    """Whether `cls` takes one of the methods from a class nearer than the one that says `fact`."""
    order = cls.__mro__

    def place(name: str) -> int:
        return next((i for i, kind in enumerate(order) if name in vars(kind)), len(order))

    return any(place(method) < place(fact) for method in methods)
