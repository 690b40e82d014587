#!/bin/sh
# Installs PyTorch into a virtual environment: install_torch.sh PYTHON [INDEX_URL]
#
# The registry's own build of it brings gigabytes of CUDA. So: with an index, from there; else, where pip would take a
# CPU build or a file at hand, that one; else, on a machine without an NVIDIA GPU, from PyTorch's index of CPU builds.
set -eu
PYTHON=$1
INDEX_URL=${2:-}
WANTED='torch>=2.11,<2.14'

"$PYTHON" -c 'import torch' 2>/dev/null && exit 0

if [ -z "$INDEX_URL" ]; then
    choice=$("$PYTHON" -m pip install --quiet --disable-pip-version-check --dry-run --no-deps --report - "$WANTED" |
        "$PYTHON" -c 'import json, sys
item = json.load(sys.stdin)["install"][0]
print(item["metadata"]["version"], item["download_info"]["url"])') || choice=""
    case "$choice" in
        *+cpu* | *" file:"*) ;;
        *) command -v nvidia-smi >/dev/null 2>&1 || [ "$(uname -s)" = Darwin ] || INDEX_URL=https://download.pytorch.org/whl/cpu ;;
    esac
fi
if [ -n "$INDEX_URL" ]; then
    exec "$PYTHON" -m pip install --disable-pip-version-check --index-url "$INDEX_URL" "$WANTED"
fi
exec "$PYTHON" -m pip install --disable-pip-version-check "$WANTED"
