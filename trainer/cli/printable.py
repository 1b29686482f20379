"""Text from files, safe to print to a terminal."""


def printable(text: str) -> str:
    """Return the text with its control characters and lone surrogates escaped, except for line ends."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )
