"""A real browser plays complete and interrupted films."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import tensortap as tap
from tests.films.filming import record
from tests.served import served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
PLAY = """
async (source) => {
  const video = document.createElement("video");
  video.muted = true;
  document.body.append(video);
  const loaded = new Promise((done, failed) => {
    video.onloadeddata = done;
    video.onerror = () => failed(new Error(video.error.message));
  });
  video.src = source;
  await loaded;
  const known = video.duration;
  const ended = new Promise((done) => { video.onended = done; });
  video.playbackRate = 8;
  await video.play();
  await ended;
  return [known, video.currentTime, video.videoWidth, video.videoHeight];
}
"""


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    """Serve a complete film and an interrupted one; return the address."""
    folder = tmp_path_factory.mktemp("films")
    recorder = tap.Recorder(folder, size=(320, 240))
    for step in range(40):
        recorder(record(np.eye(16, k=step % 10), "x", step))
    shutil.copy(folder / "x-rank0.mp4", folder / "cut.mp4")
    recorder.close()
    (folder / "index.html").write_text("<!doctype html><body></body>")
    with served(folder) as address:
        yield address


@pytest.mark.slow
def test_browser_plays_films_to_their_end(films):
    from playwright.sync_api import sync_playwright

    assert CHROMIUM, "the tests of films need chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking",
                 "--disable-component-update", "--disable-sync"]  # fmt: skip
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page()
        page.goto(films + "index.html")
        known, end, *size = page.evaluate(PLAY, films + "x-rank0.mp4")
        assert known == pytest.approx(2.0, abs=0.01)  # its length is known before it plays
        assert end == pytest.approx(2.0, abs=0.06)
        assert size == [320, 240]
        _, end, *_ = page.evaluate(PLAY, films + "cut.mp4")
        assert end == pytest.approx(1.95, abs=0.06)
        browser.close()
