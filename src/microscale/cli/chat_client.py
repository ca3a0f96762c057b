"""The terminal chat's client: one answer at a time over OpenAI's API, with the standard library only."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from microscale.errors import BadSetting, MicroscaleError

CONNECT_S = 10.0
ANSWER_S = 600.0
"""Maximum silence of the server. Its first step may compile kernels."""
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_VERSION = re.compile(r"/v[0-9]\w*(/|$)")
"""A path with a version is complete; ``/v1`` is added to other paths."""


class ServerError(MicroscaleError):
    """The server refused a request or went away."""


@dataclass
class ChatAnswer:
    """The part of an answer that has arrived, and when."""

    content: str = ""
    finish: str = ""
    num_tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    first_s: float | None = None
    last_s: float = 0.0
    num_later: int = 0
    """Tokens after those of the first chunk."""
    stopped: bool = False

    @property
    def rate(self) -> float | None:
        """Tokens per second, without prefill."""
        if self.first_s is None or not self.num_later or self.last_s <= self.first_s:
            return None
        return self.num_later / (self.last_s - self.first_s)

    def take(self, chunk: dict[str, Any]) -> tuple[str, str]:
        """Add a chunk; return the reasoning and the content that are new."""
        if usage := chunk.get("usage"):
            self.num_tokens = usage["completion_tokens"]
        if not chunk["choices"]:
            return "", ""
        choice = chunk["choices"][0]
        num_tokens = len(choice.get("token_ids") or ())
        self.num_tokens += num_tokens
        self.last_s = time.perf_counter() - self.started
        if self.first_s is None:
            self.first_s = self.last_s
        else:
            self.num_later += num_tokens
        content = choice["delta"].get("content") or ""
        self.content += content
        self.finish = choice.get("finish_reason") or self.finish
        return choice["delta"].get("reasoning") or "", content


class ChatServer:
    """``url`` is what `serve` prints, or ends with ``/v1`` as in OpenAI's clients."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise BadSetting(f"--url {url[:200]!r} is not an address such as http://127.0.0.1:8000.")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        # A server that listens on all addresses prints 0.0.0.0 or ::, which no client can connect to.
        self._address = (ANY.get(parts.hostname, parts.hostname), port)
        path = parts.path.rstrip("/")
        self._path = path if _VERSION.search(path) else f"{path}/v1"
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def model(self) -> tuple[str, int | None]:
        """The name of the served model, and the maximum length of a conversation if the server reports it."""
        connection, response = self._send("GET", f"{self._path}/models")
        try:
            model = json.loads(response.read())["data"][0]
            return model["id"], model.get("max_model_len")
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url} went away: {error}.") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ServerError(f"{self.url} does not speak OpenAI's API; use another --url, or a MODEL.") from None
        finally:
            connection.close()

    def listens(self) -> bool:
        """Whether something listens at this address."""
        try:
            socket.create_connection((self._address[0], self._address[1] or self._kind.default_port), CONNECT_S).close()
        except OSError:
            return False
        return True

    def chat(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of an answer. Closing the iterator hangs up, and the server aborts the request."""
        request = {**body, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        connection, response = self._send("POST", f"{self._path}/chat/completions", json.dumps(request).encode())
        try:
            while line := response.readline():
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    return
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise ServerError(chunk["error"]["message"])
                yield chunk
            raise ServerError("The server hung up before the answer was complete.")
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url} went away: {error}.") from None
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, body: bytes | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._kind(*self._address, timeout=CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(ANSWER_S)
            connection.request(method, path, body, self._headers | {"Content-Type": "application/json"})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerError(f"{self.url} does not answer ({error}); is the server running?") from None
        if response.status == 200:
            return connection, response
        reason = _reason(response, self.url)
        connection.close()
        raise ServerError(reason)


def _reason(response: http.client.HTTPResponse, url: str) -> str:
    if response.status == 401:
        return f"{url} needs a key; use --api-key-file."
    try:
        return str(json.loads(response.read())["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        return f"{url} answered with status {response.status}."
