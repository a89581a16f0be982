"""A server that answers /health and /v1/models and does nothing else: started by a command.

    python stub_server.py --port N [--model NAME] [--loading-s S] [--exit STATUS] [--child FILE]
        [--stubborn]

--loading-s: /health says 503 for so long. --exit: ends at once. --child: starts a process that
would live on, and writes its id to FILE. --stubborn: SIGTERM is ignored.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="stub")
    parser.add_argument("--loading-s", type=float, default=0.0)
    parser.add_argument("--exit", type=int)
    parser.add_argument("--child", type=Path)
    parser.add_argument("--stubborn", action="store_true")
    args = parser.parse_args()
    print("the stub begins")
    if args.exit is not None:
        print("no such model: wrong.gguf", file=sys.stderr)
        sys.exit(args.exit)
    if args.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.child:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        args.child.write_text(str(child.pid))
    ready_at = time.monotonic() + args.loading_s

    class Stub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = {"/health": 200, "/v1/models": 200}.get(self.path, 404)
            if time.monotonic() < ready_at:
                status = 503
            body = json.dumps({"object": "list", "data": [{"id": args.model}]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    HTTPServer(("127.0.0.1", args.port), Stub).serve_forever()


if __name__ == "__main__":
    main()
