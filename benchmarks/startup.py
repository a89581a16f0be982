"""From the start of the process to the first token, with the model on disk.

    python benchmarks/startup.py [--runs 3] [-- flags of octavo serve]

Polls the port as a client would and streams one completion as soon as it answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time

import httpx

from serving import OCTAVO, client, prompt, stream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="flags of octavo serve")
    args = parser.parse_args()
    runs = [start_once(args.flags) for _ in range(args.runs)]
    print(
        json.dumps(
            {
                "first_token_s_median": round(statistics.median(t for _, t in runs), 2),
                "ready_s_median": round(statistics.median(r for r, _ in runs), 2),
                "import_octavo_s": round(import_seconds(), 3),
                "runs": [[round(r, 2), round(t, 2)] for r, t in runs],
            }
        )
    )


def start_once(flags: list[str]) -> tuple[float, float]:
    """Seconds until the server answers, and until the first token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*OCTAVO, "serve", "--port", str(port), *flags], stdout=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        while True:
            try:
                httpx.get(f"{url}/health", timeout=1).raise_for_status()
                break
            except httpx.HTTPError:
                if process.poll() is not None:
                    raise SystemExit("the server ended") from None
                time.sleep(0.01)
        ready = time.perf_counter() - begin
        return ready, asyncio.run(first_token(url)) - begin
    finally:
        process.terminate()
        process.wait(30)


async def first_token(url: str) -> float:
    async with client(url) as http:
        return (await stream(http, prompt(1), 1)).arrivals[0]


def import_seconds() -> float:
    """Best of three, in fresh interpreters, less an empty interpreter's time."""

    def run(code: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - begin

    empty = min(run("pass") for _ in range(3))
    return min(run("import octavo") for _ in range(3)) - empty


if __name__ == "__main__":
    main()
