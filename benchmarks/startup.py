"""From the start of the process to the first token, with the model on disk.

    python benchmarks/startup.py [--runs 5] [-- flags of octavo serve]

Polls the port as a client would and streams one completion as soon as it answers; and the same for
`octavo generate`, whose first token is its first output.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time

import httpx

from serving import OCTAVO, prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("flags", nargs="*", help="flags of octavo serve")
    args = parser.parse_args()
    runs = [serve_once(args.flags) for _ in range(args.runs)]
    generated = [generate_once() for _ in range(args.runs)]
    print(
        json.dumps(
            {
                "first_token_s_median": round(statistics.median(t for _, t in runs), 3),
                "ready_s_median": round(statistics.median(r for r, _ in runs), 3),
                "generate_s_median": round(statistics.median(generated), 3),
                "import_octavo_s": round(import_seconds(), 3),
                "runs": [[round(r, 3), round(t, 3)] for r, t in runs],
                "generate_runs": [round(seconds, 3) for seconds in generated],
            }
        )
    )


def serve_once(flags: list[str]) -> tuple[float, float]:
    """Seconds until the server answers, and until the first token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Made before: a client of httpx sets TLS up, which takes 20 ms of a core that the server needs.
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as http:
        begin = time.perf_counter()
        process = subprocess.Popen(
            [*OCTAVO, "serve", "--port", str(port), *flags], stdout=subprocess.DEVNULL
        )
        try:
            while not is_healthy(http):
                if process.poll() is not None:
                    raise SystemExit("the server ended")
                time.sleep(0.005)
            ready = time.perf_counter() - begin
            return ready, first_token(http) - begin
        finally:
            process.terminate()
            process.wait(30)


def is_healthy(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


def first_token(http: httpx.Client) -> float:
    """When it came."""
    body = {"prompt": prompt(1), "max_tokens": 1, "temperature": 0, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                return time.perf_counter()
    raise SystemExit("the server sent no token")


def generate_once() -> float:
    """Seconds until `octavo generate` prints."""
    command = [*OCTAVO, "generate", prompt(1), "--max-tokens", "1", "--temperature", "0"]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        return time.perf_counter() - begin


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
