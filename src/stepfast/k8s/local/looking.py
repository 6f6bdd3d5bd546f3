"""Asks a container's probes.

Owns: one HTTP request, one connection, one command, each within its limit. Does not own: what
follows from the answer (`probing`).
"""

from __future__ import annotations

import asyncio
import contextlib

from stepfast.k8s.local.model import Probe

_STATUS_LINE_BYTES_MAX = 4096
_OK = range(200, 400)


async def look(probe: Probe, address: str, command: list[str]) -> tuple[bool, str]:
    """Whether it succeeds, and in words what was found. `command`: how an exec probe runs here."""
    try:
        async with asyncio.timeout(probe.timeout_s):
            if probe.command:
                return await _run(command)
            return await _connect(address, probe)
    except TimeoutError:
        return False, f"no answer within {probe.timeout_s:g} s"
    except OSError as error:
        return False, error.strerror or str(error)


async def _connect(address: str, probe: Probe) -> tuple[bool, str]:
    reader, writer = await asyncio.open_connection(
        address, probe.port, limit=_STATUS_LINE_BYTES_MAX
    )
    try:
        if probe.path is None:
            return True, "connected"
        request = (
            f"GET {probe.path} HTTP/1.1\r\nHost: {address}:{probe.port}\r\n"
            "User-Agent: kube-probe/local\r\nConnection: close\r\n\r\n"
        )
        writer.write(request.encode())
        line = (await reader.readline()).decode("latin-1").strip()
    except ValueError:
        return False, "the answer has no end of line"
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    words = line.split()
    is_ok = len(words) > 1 and words[1].isdecimal() and int(words[1]) in _OK
    return is_ok, f"{probe.path} answered {line or 'nothing'}"


async def _run(command: list[str]) -> tuple[bool, str]:
    devnull = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, stdin=devnull, stdout=devnull, stderr=devnull
    )
    try:
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return code == 0, f"the command ended with {code}"
