"""Text that may be the beginning of a marker whose rest has not come yet."""


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of `text` may begin `marker`; it is not in there whole."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
