"""Finding stop strings in a growing text without ever showing the beginning of one.

Knows characters only. An Aho-Corasick automaton walks the text once: its depth is the length of
the longest end of the text that begins some stop string, which is exactly what must be withheld.
The result depends on the text alone, not on the pieces it comes in.

    stops: "DEFG"     text  a b D E x D E F G y
                     depth  0 0 1 2 0 1 2 3 4      shown: "abDEx", stopped
"""

from collections import deque


class StopStrings:
    """Withholds what may become a stop string; ends the text before the first one to complete.

    Of several that complete with the same character, the longest counts.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string would stop before everything"
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._match = [0]  # length of the longest stop string that ends in this state
        self._state = 0
        self._held = ""
        self.stopped = False
        for stop in stops:
            self._insert(stop)
        self._link()

    def push(self, text: str) -> str:
        """The part of the text so far that can be shown now and was not before."""
        if self.stopped:
            return ""
        if len(self._next) == 1:
            return text
        text, walked = self._held + text, len(self._held)
        for end in range(walked, len(text)):
            self._state = self._step(self._state, text[end])
            if self._match[self._state]:
                self.stopped = True
                self._held = ""
                return text[: end + 1 - self._match[self._state]]
        shown = len(text) - self._depth[self._state]
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was withheld: the text is over and no stop string came of it."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = self._next[state][character]
        self._match[state] = len(stop)

    def _link(self) -> None:
        """Breadth first: where to go on when the next character does not fit."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            if not self._match[state]:
                self._match[state] = self._match[self._fail[state]]
            for character, child in self._next[state].items():
                self._fail[child] = self._step(self._fail[state], character)
                queue.append(child)

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)
