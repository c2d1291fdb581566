#!/usr/bin/env bash
# Fifteen minutes on a GPU, from the source tree alone: benchmarks/gpu_15_minutes.sh [FOLDER]
#
# The most valuable steps come first. Each step has a time limit and its own log, so an interrupted run loses only one step.
# The script needs torch 2.11, Triton 3.6 and the imports of tests and lab (numpy, pytest, rich, typer). It needs neither
# network nor the CPU kernel. The training step needs transformers 5.20, and the JAX step needs JAX. Without them, these
# steps report it. REHEARSE=1 runs the steps on CPU with small sizes, as far as possible.
set -u
cd "$(dirname "$0")/.."
out=${1:-build/gpu}
python=${GPU_PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="$PWD/src:$PWD/lab/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 ATTNSPAN_TUNE_CACHE=$out
export XLA_PYTHON_CLIENT_PREALLOCATE=false
if [ -n "${REHEARSE:-}" ]; then
  export TRITON_INTERPRET=1
  small="--device cpu" short="--length 40 --first 19" tiny="--length 64 --layers 1 --rounds 2"
  plain="small-16" masks="documents-8" peers="attnspan,sdpa-flash" fast="--seconds 0.01 --samples 9"
else
  export TRITON_INTERPRET=0
  small="" short="" tiny="" plain="quick-plain-*" masks="quick-masks-*" fast="--device cuda --seconds 0.2 --samples 9"
  peers=attnspan-vendor,attnspan-flex,attnspan-triton,sdpa-flash,sdpa-cudnn,flex,flash-attn,flash-attn-3
fi
: >"$out/steps.txt"

step() { # name, limit in seconds, command
  local name=$1 limit=$2 began=$SECONDS code
  shift 2
  timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
  code=$?
  printf '%-10s exit code %3d after %3d of %3d s\n' "$name" "$code" $((SECONDS - began)) "$limit" | tee -a "$out/steps.txt"
  tail -n 25 "$out/$name.log"
}

set -f # attnspan bench expands the name patterns
$python benchmarks/gpu.py >"$out/workloads.json"
bench="$python -m attnspan_lab bench --workloads $out/workloads.json"
step machine 20 $python -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.is_available() and torch.cuda.get_device_properties(0))'
step results 90 $python benchmarks/gpu_results.py $small $short
step plain 120 $bench $plain $fast --peers $peers --json "$out/plain.json.gz"
step masks 120 $bench $masks $fast --peers $peers --json "$out/masks.json.gz"
step calls 60 $python benchmarks/gpu_calls.py $small --json "$out/calls.json"
if [ -z "${REHEARSE:-}" ]; then
  step tune 180 $python -m attnspan_lab tune triton --dtypes bfloat16 --head-dims 128 --seconds 50
fi
step training 120 $python benchmarks/gpu_training.py $small $tiny --json "$out/training.json"
step jax 60 $bench $plain $fast --peers attnspan-jax,jax --modes forward --json "$out/jax.json.gz"
if command -v compute-sanitizer >/dev/null; then
  step sanitizer 60 compute-sanitizer --tool memcheck $python benchmarks/gpu_results.py --backend triton --length 40 --first 2
fi
cat "$out/steps.txt"
