"""The page in a real browser: what it draws, how it is walked with keys, how it asks for a key."""

import asyncio
import io
import os
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from dashboard_fakes import ACME, ADMIN, KEYS, Dashboard
from PIL import Image
from view_factories import make_cluster_view

from pagefleet.protos.errors import Unavailable
from pagefleet.scheduler.block_map import BlockState

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
    pytest.mark.timeout(180),
]

LIVE = "document.body.dataset.updates >= 2"
READOUT = "document.getElementById('cell').textContent"
# Each cell of a map: the pixel near its corner, where there is no sign.
CELLS = """(() => {
  const canvas = document.querySelector('canvas[data-key="replica-0/device"]');
  const context = canvas.getContext("2d");
  const pixel = (x, y) => [...context.getImageData(x, y, 1, 1).data];
  let size = 1;
  while (pixel(size, 4)[3] !== 0) size += 1;
  size += 1;
  const columns = Math.floor(canvas.clientWidth / size);
  return [...Array(256).keys()].map((i) =>
    pixel((i % columns) * size + 2, Math.floor(i / columns) * size + 2).slice(0, 3));
})()"""
PALETTE = """["clean", "cached", "referenced", "shared", "fenced", "host"].map((name) => {
  const text = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
})"""
# What can be reached with Tab and has no name for a screen reader.
UNNAMED = """[...document.querySelectorAll("button, input, a, canvas, [tabindex]")].filter((node) =>
  node.offsetParent !== null && !node.textContent.trim() && !node.getAttribute("aria-label") &&
  !node.getAttribute("aria-labelledby") && !node.labels?.length &&
  node.getAttribute("aria-hidden") !== "true").map((node) => node.outerHTML)"""


@pytest.fixture
async def browser():
    async with Browser() as made:
        yield made


async def picture(browser: Browser, name: str):
    """A screenshot as pixels; kept where the environment names a folder."""
    folder = os.environ.get("PAGEFLEET_SCREENSHOTS")
    shot = await browser.screenshot(Path(folder, f"{name}.png") if folder else None)
    return np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(int)


def has_colour(pixels, colour: list[int]) -> bool:
    return bool((np.abs(pixels - np.array(colour)).max(axis=2) <= 2).any())


async def test_draws_every_block_in_the_colour_of_its_state(browser) -> None:
    async with Dashboard() as dashboard:
        dashboard.is_still = True
        await browser.open(dashboard.url)
        await browser.until(LIVE)
        palette = await browser.run(PALETTE)
        shown = [palette.index(cell) for cell in await browser.run(CELLS)]
    expected = [cell & 7 for cell in make_cluster_view(*dashboard.sizes).pools[0].map.cells]
    assert set(expected) >= {BlockState.CLEAN, BlockState.CACHED, BlockState.SHARED}
    assert shown == expected
    assert browser.problems == []


async def test_shows_queue_leases_decisions_prefixes_and_what_clients_call_themselves(browser):
    async with Dashboard() as dashboard:
        await browser.open(dashboard.url)
        await browser.until(LIVE)
        text = str(await browser.run("document.body.innerText"))
        counts = {
            name: await browser.run(f"document.querySelectorAll('{selector}').length")
            for name, selector in (
                ("waiting", "#queue-table tbody tr"),
                ("leases", "#lease-table tbody tr"),
                ("trees", "#prefix-trees h3"),
                ("nodes", "#prefix-trees li"),
                ("canvases", "#pool-maps canvas"),
                ("bold", "b"),
            )
        }
        await browser.run("document.querySelector('#decision-list summary').click()")
        costs = await browser.run("document.querySelector('#decision-list .costs').innerText")
    assert counts == {
        **{"waiting": 12, "leases": 12, "trees": 4, "nodes": 20, "canvases": 8},
        "bold": 0,
    }
    assert "<b>umbrella</b>" in text, "a tenant's name is text, whatever it is"
    for words in (
        "12 of 17, oldest first",
        "its deadline passed before it could start",
        "draining",
    ):
        assert words in text, words
    assert "prefill" in costs and "cached elsewhere" in costs
    assert browser.problems == []


async def test_dark_light_and_one_state_alone(browser) -> None:
    async with Dashboard() as dashboard:
        dashboard.is_still = True
        await browser.prefer("dark")
        await browser.open(dashboard.url)
        await browser.until(LIVE)
        dark = await picture(browser, "dark")
        fenced = (await browser.run(PALETTE))[BlockState.FENCED]
        cached = (await browser.run(PALETTE))[BlockState.CACHED]
        await browser.run("document.querySelectorAll('#legend button')[4].click()")
        alone = await picture(browser, "fenced-alone")
        await browser.run("document.querySelectorAll('#legend button')[4].click()")
        await browser.prefer("light")
        light = await picture(browser, "light")
        await browser.run("document.getElementById('theme').click()")
        forced = await picture(browser, "dark-forced")
    assert dark.mean() < 60 < 190 < light.mean(), "as the system prefers"
    assert forced.mean() < 60, "as the button says"
    maps = slice(260, 600)
    assert has_colour(dark[maps], cached) and has_colour(dark[maps], fenced)
    assert has_colour(alone[maps], fenced) and not has_colour(alone[maps], cached)


async def test_is_walked_with_the_keyboard(browser) -> None:
    async with Dashboard() as dashboard:
        dashboard.is_still = True
        await browser.open(dashboard.url)
        await browser.until(LIVE)
        stops: list[str] = []
        for _ in range(40):
            await browser.press("Tab")
            active = "document.activeElement"
            stops.append(str(await browser.run(f"{active}.dataset.key ?? {active}.textContent")))
            if stops[-1] == "replica-0/device":
                break
        order = ["Block pools", "Pause", "Theme: auto", "Table", "replica-0/device"]
        assert [stop for stop in stops if stop in order] == order
        assert "replica-0 device, block 0: " in str(await browser.until(READOUT))
        for key, where in (
            ("ArrowRight", "device, block 1:"),
            ("End", "device, block 255:"),
            ("ArrowRight", "device, block 255:"),
            ("Home", "device, block 0:"),
            ("PageDown", "replica-0 host, block 0:"),
            ("PageDown", "replica-1 device, block 0:"),
        ):
            await browser.press(key)
            assert where in str(await browser.run(READOUT)), key
        await browser.press("Tab")
        left = await browser.run("document.activeElement.dataset.key ?? ''")
        assert left == "", "all maps are one stop"


async def test_says_the_same_as_a_table_and_names_everything(browser) -> None:
    async with Dashboard() as dashboard:
        dashboard.is_still = True
        await browser.open(dashboard.url)
        await browser.until(LIVE)
        assert await browser.run(UNNAMED) == []
        label = await browser.run("document.querySelector('#pool-maps canvas').ariaLabel")
        device = make_cluster_view(*dashboard.sizes).state.replicas[0].device
        assert f"{device.clean} clean, {device.cached_idle} cached" in str(label)
        await browser.run("document.getElementById('as-table').click()")
        row = await browser.run("document.querySelector('#pool-table tbody tr').innerText")
        numbers = (device.clean, device.cached_idle, device.referenced, device.fenced, 256)
        cells = str(row).split("\t")
        assert [int(cells[place]) for place in (2, 3, 4, 6, 7)] == list(numbers)
        await browser.run("document.querySelector('#pool-table button').click()")
        runs = await browser.run(
            "[...document.querySelectorAll('#pool-table table:last-child tbody tr')]"
            ".map((row) => row.innerText)"
        )
        assert str(runs[0]).startswith("0 to ") and str(runs[-1]).split("\t")[0].endswith(" 255")
        assert await browser.run(UNNAMED) == []


async def test_asks_for_a_key_and_keeps_it_in_the_tab(browser) -> None:
    async with Dashboard(keys=KEYS) as dashboard:
        await browser.open(dashboard.url)
        for key, problem in (
            ("pf-wrong-0123456789abcdef", "not known"),
            (ACME, "admin key"),
        ):
            await browser.until("document.getElementById('key-dialog').open")
            await browser.type(key)
            await browser.press("Enter")
            said = "document.getElementById('key-problem').textContent"
            await browser.until(f"{said}.includes('{problem}')")
        await browser.type(ADMIN)
        await browser.press("Enter")
        await browser.until(LIVE)
        assert await browser.run("document.getElementById('key-dialog').open") is False
        assert ADMIN not in str(
            await browser.run("location.href + document.documentElement.outerHTML")
        )
        stores = await browser.run("[sessionStorage.length, localStorage.length, document.cookie]")
        assert stores == [1, 0, ""]
        await browser.run("document.getElementById('forget').click()")
        assert await browser.run("sessionStorage.length") == 0


@pytest.mark.slow
async def test_shows_64_pools_of_100_000_blocks(browser) -> None:
    async with Dashboard(64, 100_000, 20_000) as dashboard:
        await browser.open(dashboard.url, width=1680, height=1500)
        await browser.until(LIVE, timeout_s=60)
        pixels = await picture(browser, "64-pools")
        palette = await browser.run(PALETTE)
        drawn = await browser.run(
            "[...document.querySelectorAll('#pool-maps canvas')].filter((c) => c.width > 300"
            " || c.width > 100 && c.height > 6).length"
        )
        await browser.until("document.body.dataset.updates >= 4", timeout_s=60)
    assert drawn == 128
    assert all(has_colour(pixels, palette[state]) for state in (1, 2, 3, 4, 5))
    assert browser.problems == []


async def test_comes_back_when_the_controller_does(browser) -> None:
    async def fail():
        raise Unavailable("the controller is restarting")

    state = "document.getElementById('connection').dataset.state"
    async with Dashboard() as dashboard:
        await browser.open(dashboard.url)
        await browser.until(LIVE)
        dashboard.controller.watch = fail
        await browser.until(f"{state} === 'away'")
        assert "restarting" in str(await browser.run("document.body.innerText"))
        dashboard.controller.watch = dashboard.watch
        await browser.until(f"{state} === 'live'")


async def test_watches_nothing_while_paused(browser) -> None:
    async with Dashboard() as dashboard:
        await browser.open(dashboard.url)
        await browser.until(LIVE)
        await browser.run("document.getElementById('pause').click()")
        await browser.until("document.getElementById('connection').textContent === 'paused'")
        async with asyncio.timeout(10):
            while dashboard.gateway._watch.num_watchers:
                await browser.run("0")
        await browser.run("document.getElementById('pause').click()")
        await browser.until("document.getElementById('connection').textContent === 'live'")
