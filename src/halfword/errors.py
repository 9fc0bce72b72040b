"""The one way that halfword tells a user of the command line that an input is wrong."""


class UsageError(ValueError):
    """Bad input, told in one line: the argument, its value, and what to do instead.

    >>> raise UsageError("--num_heads", 3, "does not divide --hidden_dim 64")
    Traceback (most recent call last):
        ...
    halfword.errors.UsageError: --num_heads 3: does not divide --hidden_dim 64
    """

    def __init__(self, argument: str, value: object, fix: str) -> None:
        super().__init__(f"{argument} {value}: {fix}")
        self.argument, self.value, self.fix = argument, value, fix
