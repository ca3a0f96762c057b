"""Open WebUI itself, as its users run it: its server's connection, and a direct connection, which goes from the page in
a browser (the system's Chromium) straight to ours and so needs CORS."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from checks import KEY, MODEL, SCRIPTED_MODEL, SCRIPTED_V1, SUM, V1, check, main, tool
from playwright.sync_api import sync_playwright

PATIENCE_S = 180.0
FOLDER = Path(tempfile.mkdtemp())


def start() -> str:
    """Its address, once it answers. It runs without accounts, without a network and in a folder of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "HOME": str(FOLDER),
        "DATA_DIR": str(FOLDER / "data"),
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "not secret",
        "ENABLE_DIRECT_CONNECTIONS": "True",
        "ENABLE_OLLAMA_API": "False",
        "OPENAI_API_BASE_URL": V1,
        "OPENAI_API_KEY": KEY,
        "OFFLINE_MODE": "True",
        "HF_HUB_OFFLINE": "1",
    }
    command = [tool("open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (FOLDER / "log").open("w") as log:
        process = subprocess.Popen(command, env=env, cwd=FOLDER, stdout=log, stderr=log, start_new_session=True)
    atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
    atexit.register(os.killpg, process.pid, signal.SIGKILL)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return address
        except OSError:
            time.sleep(0.5)
    raise AssertionError((FOLDER / "log").read_text()[-2000:])


page_address = start()


def ask(path: str, body: Any = None, token: str = "") -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(page_address + path, data, headers), timeout=120) as reply:
        return json.load(reply)


token = ask("/api/v1/auths/signin", {"email": "", "password": ""})["token"]


@check("its own connection: models and a chat")
def backend() -> None:
    assert MODEL in [model["id"] for model in ask("/api/models", token=token)["data"]]
    said = {"model": MODEL, "messages": [{"role": "user", "content": SUM}], "stream": False, "max_tokens": 400}
    assert "42" in ask("/api/chat/completions", said, token)["choices"][0]["message"]["content"]


@check("a direct connection from the browser: preflight, models and a streamed chat")
def direct() -> None:
    # With its tools the prompt is longer than the embedded model's context.
    config = {"enable": True, "tags": [], "prefix_id": "direct", "model_ids": [], "connection_type": "external"}
    connections = {"OPENAI_API_BASE_URLS": [SCRIPTED_V1], "OPENAI_API_KEYS": [KEY], "OPENAI_API_CONFIGS": {"0": config}}
    settings = {"ui": {"directConnections": connections, "showChangelog": False, "version": "99.0.0"}}
    ask("/api/v1/users/user/settings/update", settings, token)
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert found, "there is no Chromium on this machine"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = browser.new_page()
        page.add_init_script(f"localStorage.token = {json.dumps(token)}; localStorage.locale = 'en-US'")
        asked: list[str] = []
        page.on("request", lambda sent: asked.append(f"{sent.method} {sent.url}"))
        page.goto(f"{page_address}/?models=direct.{SCRIPTED_MODEL}")
        page.locator("#chat-input").click(timeout=60_000)
        page.keyboard.type(SUM)
        page.keyboard.press("Enter")
        try:
            page.get_by_text("42").first.wait_for(timeout=60_000)
        except Exception:
            page.screenshot(path=os.environ.get("MICROSCALE_SCREEN", str(FOLDER / "screen.png")))
            raise AssertionError([line for line in asked if SCRIPTED_V1 in line] + asked[-20:]) from None
        assert f"POST {SCRIPTED_V1}/chat/completions" in asked, asked
        assert f"GET {SCRIPTED_V1}/models" in asked, asked
        browser.close()


main()
