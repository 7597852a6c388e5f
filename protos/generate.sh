#!/usr/bin/env bash
# Makes the Python code beside the protos. With --check: fails if it differs.
#
# The tools are in an environment of their own, .venv-ci/protos. Generated code runs with the versions of grpcio and
# protobuf that generated it and with later ones, so these are the oldest that npuserve allows (.ci/pins).
set -euo pipefail
cd "$(dirname "$0")"
tools=../.venv-ci/protos
pins="grpcio-tools==1.81.1 grpcio==1.81.1 protobuf==6.33.5 mypy-protobuf==5.1.0"
if [ "$(cat $tools/pins 2>/dev/null)" != "$pins" ]; then
    rm -rf $tools
    python -m venv $tools
    # shellcheck disable=SC2086
    $tools/bin/python -m pip install -q $pins
    echo "$pins" >$tools/pins
fi
export PATH="$PWD/$tools/bin:$PATH"
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
