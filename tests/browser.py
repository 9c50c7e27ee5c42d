"""A headless Chromium of our own, spoken to over two pipes. Knows DevTools, and no page."""

import asyncio
import base64
import fcntl
import itertools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)

_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
)
_TIMEOUT_S = 30.0
# Chromium reads commands from 3 and writes to 4, whatever they are in this process.
_LAUNCHER = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_LOOK_S = 0.02  # between two looks at the page


class PageError(Exception):
    """What a script on the page threw, or what the browser would not do."""


class Browser:
    """One page, in a profile that is gone afterwards."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(
            prefix="pf-chromium-", ignore_cleanup_errors=True
        )
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict]] = {}
        self._session: str | None = None
        self.problems: list[str] = []  # exceptions, refusals and errors that the page's console has

    async def __aenter__(self) -> "Browser":
        to_browser, from_browser = _high(os.pipe()), _high(os.pipe())
        assert CHROMIUM is not None, "skip the test where there is no Chromium"
        pipes = (str(to_browser[0]), str(from_browser[1]))
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _LAUNCHER, *pipes, CHROMIUM),
            *(*_FLAGS, f"--user-data-dir={self._profile.name}"),
            pass_fds=(to_browser[0], from_browser[1]),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        self._out = to_browser[1]
        reader = asyncio.StreamReader(limit=2**26)
        self._in = os.fdopen(from_browser[0], "rb")
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._in
        )
        self._listening = asyncio.create_task(self._listen(reader))
        target = await self.send("Target.createTarget", url="about:blank")
        attach = {"targetId": target["targetId"], "flatten": True}
        self._session = (await self.send("Target.attachToTarget", **attach))["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.cancel()
        self._process.kill()
        await self._process.wait()
        await asyncio.gather(self._listening, return_exceptions=True)
        self._transport.close()
        os.close(self._out)
        self._profile.cleanup()

    async def send(self, method: str, **parameters: object) -> dict:
        """A command and its result."""
        number = next(self._numbers)
        message: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        os.write(self._out, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(_TIMEOUT_S):
            return await reply

    async def open(self, url: str, *, width: int = 1440, height: int = 1000) -> None:
        """Go there. The page may still be loading afterwards."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        await self.send("Page.navigate", url=url)

    async def prefer(self, theme: str) -> None:
        """What the system says: "dark" or "light"."""
        features = [{"name": "prefers-color-scheme", "value": theme}]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def run(self, script: str) -> object:
        """The value of an expression on the page, awaited if it is a promise."""
        options = {"awaitPromise": True, "returnByValue": True}
        reply = await self.send("Runtime.evaluate", expression=script, **options)
        if "exceptionDetails" in reply:
            raise PageError(reply["exceptionDetails"]["exception"].get("description", str(reply)))
        return reply["result"].get("value")

    async def until(self, condition: str, timeout_s: float = 15.0) -> object:
        """Wait until an expression is true on the page; neither may be there yet."""
        problem: object = "it is false"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        if found := await self.run(condition):
                            return found
                    except PageError as error:
                        problem = error
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise PageError(f"{condition}: {problem}; the page: {self.problems}") from None

    async def press(self, key: str) -> None:
        """A key, as from a keyboard."""
        text = {"Enter": "\r", " ": " "}.get(key)
        codes = {"Enter": 13, "Tab": 9, " ": 32, "Escape": 27}
        event: dict[str, object] = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": codes.get(key, 0),
        }
        down = event | ({"text": text} if text else {})
        await self.send("Input.dispatchKeyEvent", type="keyDown", **down)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.send("Input.insertText", text=text)

    async def screenshot(self, path: Path | None = None) -> bytes:
        """What the window shows, as PNG."""
        shot = base64.b64decode((await self.send("Page.captureScreenshot", format="png"))["data"])
        if path is not None:
            path.write_bytes(shot)
        return shot

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while True:
            message = json.loads((await reader.readuntil(b"\0"))[:-1])
            reply = self._replies.pop(message.get("id", 0), None)
            if reply is None:
                self._note(message)
            elif "error" in message:
                reply.set_exception(PageError(str(message["error"])))
            else:
                reply.set_result(message["result"])

    def _note(self, event: dict) -> None:
        match event["method"]:
            case "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                self.problems.append(
                    str(details.get("exception", details).get("description", details))
                )
            case "Log.entryAdded" if event["params"]["entry"]["level"] == "error":
                self.problems.append(event["params"]["entry"]["text"])
            case _:
                pass


def _high(ends: tuple[int, int]) -> tuple[int, int]:
    """The same pipe, away from 3 and 4, which are Chromium's."""
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high  # pyright: ignore[reportReturnType]
