"""What a model thinks, told apart from what it answers: the text within `<think>` tags.

Text comes in pieces; a tag that may be cut is held back until its rest has come.
"""

from .partial_marker import held_back

OPEN, CLOSE = "<think>", "</think>"


class ReasoningReader:
    """The thoughts stand at the beginning; after them all is answer.

    Args:
        is_open: the prompt has opened the tag already.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._is_open = is_open
        self._is_over = False
        self._starts = is_open  # what is shown next follows a tag and its line breaks
        self._text = ""

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that are certain."""
        if self._is_over and not self._starts:
            return "", text
        self._text += text
        if not self._is_open and not self._is_over and not self._find_open():
            return "", ""
        reasoning = self._read_reasoning() if self._is_open else ""
        return reasoning, self._read_answer() if self._is_over else ""

    def flush(self) -> tuple[str, str]:
        """The text is over."""
        text, self._text = self._text, ""
        return (text, "") if self._is_open else ("", text)

    def _find_open(self) -> bool:
        """Whether it is decided if the text begins with a tag."""
        start = self._text.lstrip()
        if start.startswith(OPEN):
            self._is_open, self._starts, self._text = True, True, start[len(OPEN) :]
            return True
        if OPEN.startswith(start):
            return False
        self._is_over = True
        return True

    def _read_reasoning(self) -> str:
        self._strip_start()
        before, closed, rest = self._text.partition(CLOSE)
        if closed:
            self._is_open, self._is_over, self._starts = False, True, True
            self._text = rest
            return before.rstrip("\n")
        shown = before[: len(before) - held_back(before, CLOSE)]
        shown = shown.rstrip("\n")  # those before the closing tag belong to the format
        self._text = before[len(shown) :]
        return shown

    def _read_answer(self) -> str:
        self._strip_start()
        text, self._text = self._text, ""
        return text

    def _strip_start(self) -> None:
        if self._starts:
            self._text = self._text.lstrip("\n")
            self._starts = not self._text
