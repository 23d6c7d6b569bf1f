"""Exit status 0 when the server in this container is ready to answer. Standard library only."""

from __future__ import annotations

import http.client
import os
import sys

connection = http.client.HTTPConnection("127.0.0.1", int(os.environ.get("CHATSVC_PORT", "8000")), timeout=4)
try:
    connection.request("GET", "/ready")
    status = connection.getresponse().status
except OSError as error:
    print(f"no answer: {error}")
    sys.exit(1)
print(status)
sys.exit(0 if status == 200 else 1)
