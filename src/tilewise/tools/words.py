"""Numbers and nouns in messages."""


def counted(number: int, noun: str) -> str:
    """`1 kernel`, `2 kernels`, `3 entries`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("y") else f"{number} {noun}s"
