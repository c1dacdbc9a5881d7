"""One streamed completion over HTTP/1.1, as server-sent events. Standard library only.

The client reads events as they come and parses each once, so that it costs the machine little beside the server.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

LONGEST_LINE = 2**22


async def events(host: str, port: int, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events' values, as they arrive. Raises RuntimeError unless the server accepts."""
    reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_LINE)
    try:
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1",
            f"Host: {host}:{port}",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            "Connection: close",
        )
        writer.write("\r\n".join((*head, "", "")).encode() + content)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(
                f"{path}: {status.decode().strip()}: {(await reader.read(1000)).decode(errors='replace')}"
            )
        while line := await reader.readline():
            # Lines that are no event are headers, and the sizes of chunks.
            if line.startswith(b"data:") and (value := line[5:].strip()) != b"[DONE]":
                yield json.loads(value)
    finally:
        writer.close()
