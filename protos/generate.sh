#!/bin/sh
# Makes the Python bindings and their stubs under blockyard/, beside the hand-written modules.
# The compiler is pinned in protos/compiler.txt and the stubs' maker in pyproject.toml (extra `dev`), so that the same
# input gives the same bytes.
set -eu
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-.venv/bin/python}"
OUT="${1:-.}"
PATH="$(dirname "$PYTHON"):$PATH" "$PYTHON" -m grpc_tools.protoc -I protos \
    --python_out="$OUT" --mypy_out=quiet:"$OUT" --grpc_python_out="$OUT" --mypy_grpc_out=quiet:"$OUT" \
    $(find protos/blockyard -name '*.proto' | sort)
# Google's messages of errors have a copy here, for where googleapis-common-protos is not: see blockyard/google_rpc.
mkdir -p "$OUT/blockyard/google_rpc"
"$PYTHON" -m grpc_tools.protoc -I protos --python_out="$OUT/blockyard/google_rpc" \
    google/rpc/error_details.proto google/rpc/status.proto
find "$OUT/blockyard" -path "$OUT/blockyard/google_rpc" -prune -o -name '*_pb2.py' -exec \
    sed -i 's/^from google\.rpc import /from blockyard.google_rpc import /' {} +
for folder in $(cd protos && find blockyard -name '*.proto' -exec dirname {} \; | sort -u); do
    for package in "$OUT/$(dirname "$folder")" "$OUT/$folder"; do
        [ -f "$package/__init__.py" ] || : > "$package/__init__.py"
    done
done
