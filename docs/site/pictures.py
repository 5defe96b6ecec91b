"""Look at the site's pages in Chromium: a picture of each, and what does not fit its width.

    make pictures   # build/site, then build/pictures/*.png

Needs Chromium with its driver (Debian: chromium, chromium-driver). Exits with an error where a page is wider than its
window, of 400 and of 1280 pixels, where code has to be scrolled in the latter, or where a script of the site fails.
What programs print may be scrolled, and so may tables.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).parents[2]
SITE, PICTURES = ROOT / "build" / "site", ROOT / "build" / "pictures"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync"]
WIDE, NARROW, MOST = 1280, 400, 12_000  # pixels; the last, of a picture's height
FITS = "return document.documentElement.scrollWidth <= window.innerWidth"
SCROLLED = """
return [...document.querySelectorAll(arguments[0])].filter(one => one.scrollWidth > one.clientWidth + 1)
    .map(one => one.textContent.trim().slice(0, 60))
"""
CODE = "pre > code:has(span[class])"  # what has colours; the rest is what programs print
DRAWN = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
HEIGHT = "return document.documentElement.scrollHeight"


def looked_at(browser: webdriver.Chrome, page: Path) -> list[str]:
    """Take the picture of a page; what is wrong with it."""
    wrong = []
    browser.get(page.as_uri())
    for width in (NARROW, WIDE):
        browser.set_window_size(width, 900)
        browser.execute_async_script(DRAWN)
        if not browser.execute_script(FITS):
            wrong.append(f"wider than {width} pixels")
    wrong += [f"code is cut: {text}" for text in browser.execute_script(SCROLLED, CODE)]
    wrong += [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    browser.set_window_size(WIDE, min(MOST, int(browser.execute_script(HEIGHT))))
    name = "-".join(page.relative_to(SITE).with_suffix("").parts)
    browser.save_screenshot(str(PICTURES / f"{name}.png"))
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    parser.add_argument("--driver", default=shutil.which("chromedriver"))
    args = parser.parse_args()
    if args.chromium is None or args.driver is None:
        sys.exit("Chromium and its driver are needed: install them, or say where they are (--chromium, --driver)")
    pages = [page for page in sorted(SITE.rglob("*.html")) if page.name != "404.html"]
    if not pages:
        sys.exit("there is no site: make docs")
    shutil.rmtree(PICTURES, ignore_errors=True)
    PICTURES.mkdir(parents=True)
    options = webdriver.ChromeOptions()
    options.binary_location = args.chromium
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    for flag in FLAGS:
        options.add_argument(flag)
    failed = 0
    with webdriver.Chrome(options, Service(args.driver)) as browser:
        for page in pages:
            wrong = looked_at(browser, page)
            failed += bool(wrong)
            for text in wrong:
                print(f"{page.relative_to(SITE)}: {text}")
    print(f"{len(pages)} pages, of which {failed} do not fit; pictures in {PICTURES.relative_to(ROOT)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
