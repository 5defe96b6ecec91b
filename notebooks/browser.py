"""Look at the notebooks in a real JupyterLab: run each, press the stop button and restart, take pictures.

python browser.py [--chromium /usr/bin/chromium] [--driver /usr/bin/chromedriver]

Needs the extra `browser`, and Chromium with its driver (Debian: chromium, chromium-driver). The pictures go to
`screenshots/`. Exits with an error if a cell fails, if the stop button does not stop the ranks, or if a process of a
mesh outlives its kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

HERE = Path(__file__).parent
PICTURES = HERE / "screenshots"
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=980,1200"),
]
SETTINGS = {
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},  # cells out of sight are drawn, too
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
}
STOPPED = [
    "import time\nfrom tqdm.auto import tqdm\nfrom spmd import Mesh, axis_index\n\nmesh = Mesh({'data': 2})\nmesh",
    "def endless():\n    print('begun on rank', axis_index('data'))\n    for _ in tqdm(range(600), 'working'):\n"
    "        time.sleep(0.1)\n\n\nmesh.run(endless)",
    "mesh.run(lambda: axis_index('data'))",
    "print(*mesh.driver.pids)",
]


@contextlib.contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """A JupyterLab of its own that serves a folder; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / ".config"
    (config / "labconfig").mkdir(parents=True)
    (config / "labconfig" / "default_setting_overrides.json").write_text(json.dumps(SETTINGS))
    options = ["--no-browser", "--allow-root", "--expose-app-in-browser", f"--port={port}", "--ip=127.0.0.1"]
    options += ["--IdentityProvider.token=", f"--ServerApp.root_dir={folder}"]
    own = {name: str(config / name) for name in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    with open(folder / ".log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            env={**os.environ, "JUPYTER_CONFIG_DIR": str(config), **own},
            stdout=log,
            stderr=log,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait(lambda: answers(f"{address}/api"), "JupyterLab did not start:\n" + (folder / ".log").read_text())
        yield address
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(10)
        server.kill()


def answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(urllib.request.urlopen(url, timeout=5).status == 200)
    return False


def wait(condition: Callable[[], Any], problem: str, seconds: float = 90.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise SystemExit(f"after {seconds:g} s: {problem}")
        time.sleep(0.1)
    return found


class Page:
    """A notebook in the browser."""

    def __init__(self, browser: webdriver.Chrome, url: str):
        self._browser = browser
        browser.set_window_size(980, 1200)
        browser.get(url)
        ready = "return !!(window.jupyterapp && document.querySelector('.jp-Notebook .jp-Cell'))"
        wait(lambda: browser.execute_script(ready), f"{url} did not open")
        wait(lambda: self.text(".jp-Notebook-ExecutionIndicator, .jp-Toolbar-kernelStatus") is not None, "no kernel")
        wait(lambda: self._kernel() == "idle", "the kernel did not start")

    def _kernel(self) -> str | None:
        script = "return window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status"
        return self._browser.execute_script(script)

    def text(self, selector: str) -> str | None:
        """The text of all elements that a selector finds, None if there are none."""
        found = self._browser.find_elements(By.CSS_SELECTOR, selector)
        return "\n".join(one.get_attribute("textContent") or "" for one in found) if found else None

    def errors(self) -> list[str]:
        """The names of the exceptions that cells have ended with."""
        cells = "[...window.jupyterapp.shell.currentWidget.content.model.cells]"
        outputs = f"{cells}.flatMap(cell => cell.toJSON().outputs ?? [])"
        return list(self._browser.execute_script(f"return {outputs}.map(o => o.ename).filter(Boolean)"))

    def command(self, name: str) -> None:
        self._browser.execute_script(f"window.jupyterapp.commands.execute({name!r})")

    def run_cell(self) -> None:
        """Run the cell that is active, and go on to the next."""
        self.command("notebook:run-cell-and-select-next")

    def finished(self) -> bool:
        return "[*]" not in (self.text(".jp-InputPrompt") or "[*]") and self._kernel() == "idle"

    def press(self, what: str) -> None:
        """Click a button of the notebook's toolbar, as a user does."""
        self._browser.find_element(By.CSS_SELECTOR, f".jp-NotebookPanel-toolbar [data-command='{what}']").click()

    def picture(self, name: str) -> None:
        """Keep the whole notebook, from its first cell to its last, as a small PNG."""
        script = "return [...document.querySelectorAll('.jp-Notebook .jp-Cell')].at(-1).getBoundingClientRect().bottom"
        self._browser.execute_script("document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0")
        self._browser.set_window_size(980, 300 + int(self._browser.execute_script(script)))
        time.sleep(1.0)  # until all is drawn at the new size
        bottom = int(self._browser.execute_script(script)) + 20
        image = Image.open(io.BytesIO(self._browser.get_screenshot_as_png())).convert("RGB")
        PICTURES.mkdir(exist_ok=True)
        image = image.crop((0, 0, image.width, min(bottom, image.height)))
        image.quantize(128, dither=Image.Dither.NONE).save(PICTURES / f"{name}.png", optimize=True)
        print(f"{name}.png: {image.width} x {image.height}, {(PICTURES / f'{name}.png').stat().st_size // 1024} KiB")


def run_all(browser: webdriver.Chrome, address: str, name: str) -> None:
    page = Page(browser, f"{address}/doc/tree/{name}.ipynb")
    page.command("notebook:restart-run-all")
    # The dialog that asks whether to restart.
    wait(lambda: browser.find_elements(By.CSS_SELECTOR, ".jp-Dialog .jp-mod-accept"), "no dialog")[0].click()
    began = time.monotonic()
    wait(lambda: "[1]" in (page.text(".jp-InputPrompt") or ""), f"{name} did not begin")
    wait(page.finished, f"{name} did not end", 120)
    if errors := page.errors():
        raise SystemExit(f"{name}: {errors}")
    print(f"{name}: {time.monotonic() - began:.0f} s")
    page.picture(name)


def stop(browser: webdriver.Chrome, address: str) -> None:
    page = Page(browser, f"{address}/doc/tree/stop.ipynb")
    page.run_cell()
    page.run_cell()
    wait(lambda: "working:" in (page.text(".jupyter-widgets") or ""), "no progress bar")
    time.sleep(2.0)
    page.picture("stop_running")
    began = time.monotonic()
    page.press("notebook:interrupt-kernel")
    wait(lambda: page.errors() == ["KeyboardInterrupt"], "the stop button did nothing", 20)
    print(f"stopped after {time.monotonic() - began:.1f} s")
    page.run_cell()
    page.run_cell()
    wait(page.finished, "the mesh does not work after the stop button", 20)
    outputs = (page.text(".jp-OutputArea-output") or "").splitlines()
    if "[0, 1]" not in outputs:
        raise SystemExit(f"the mesh does not work after the stop button: {outputs}")
    page.picture("stop_pressed")
    pids = next(line for line in reversed(outputs) if line.replace(" ", "").isdigit()).split()
    page.press("notebook:restart-kernel")
    wait(lambda: browser.find_elements(By.CSS_SELECTOR, ".jp-Dialog .jp-mod-accept"), "no dialog")[0].click()
    wait(lambda: not any(map(alive, pids)), f"ranks {pids} outlive their kernel", 20)
    print("no rank outlives its kernel")


def alive(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chromium", default=shutil.which("chromium") or "/usr/bin/chromium")
    parser.add_argument("--driver", default=shutil.which("chromedriver") or "/usr/bin/chromedriver")
    parser.add_argument("names", nargs="*", help="notebooks, without .ipynb; all and the stop button if none is named")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        for path in HERE.glob("*.ipynb"):
            shutil.copy(path, folder)
        cells = [nbformat.v4.new_code_cell(source) for source in STOPPED]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}  # else a dialog asks for it
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / "stop.ipynb")
        address = stack.enter_context(jupyterlab(folder))
        options = webdriver.ChromeOptions()
        options.binary_location = arguments.chromium
        for flag in (*FLAGS, f"--user-data-dir={folder / '.profile'}"):
            options.add_argument(flag)
        browser = webdriver.Chrome(options, Service(arguments.driver))
        stack.callback(browser.quit)
        for one in arguments.names or [*sorted(path.stem for path in HERE.glob("*.ipynb")), "stop"]:
            (stop if one == "stop" else lambda b, a, one=one: run_all(b, a, one))(browser, address)


if __name__ == "__main__":
    main()
