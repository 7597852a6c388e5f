#!/usr/bin/env bash
# Makes the Python code beside the protos. Needs `pip install npuserve[dev]`. With --check: fails if it differs.
set -euo pipefail
cd "$(dirname "$0")"
out=.
[ "${1:-}" = --check ] && { out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; }
python -m grpc_tools.protoc -I. --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" npuserve/v1/*.proto
# A file without a service has an empty _grpc twin: not kept.
for file in "$out"/npuserve/v1/*_pb2_grpc.py; do grep -q Servicer "$file" || rm "$file"; done
if [ "$out" != . ]; then
    diff -r --exclude='*.proto' --exclude=__pycache__ --exclude=__init__.py --exclude=py.typed \
        "$out/npuserve/v1" npuserve/v1 \
        || { echo "generated code is not what protos/generate.sh makes" >&2; exit 1; }
fi
