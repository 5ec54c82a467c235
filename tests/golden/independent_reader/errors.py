class UnreadableError(Exception):
    """Not a snapshot that this reader may read."""


def require(condition: object, reason: str) -> None:
    if not condition:
        raise UnreadableError(reason)
