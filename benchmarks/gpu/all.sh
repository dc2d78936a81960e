#!/usr/bin/env bash
# Everything that one GPU has to say, correctness first: each figure beside its floor and its target.
#   benchmarks/gpu/all.sh OUT [VLLM_FOLDER]
# Needs the rooms on PYTHONPATH (or installed), a built kvtransfer, and a CUDA build of UCX (BATON_UCX_LIBRARY). Takes about ten minutes, six of
# them the peers'. Exits with the number of parts that failed or missed a target.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
vllm=${2:-}
cd "$(dirname "$0")/../.."
model=benchmarks/gpu/qwen3-8b
. benchmarks/gpu/parts.sh
part kernels-correct 240 env BATON_KERNELS_DEVICE=cuda "${pytest[@]}" libs/kernels
part engine-correct 300 env BATON_ENGINE_DEVICE=cuda:0 "${pytest[@]}" libs/engine/tests/test_engine_device.py libs/engine/tests/test_engine_chunk_graphs.py \
    libs/engine/tests/test_engine_page_hash.py libs/engine/tests/test_engine_penalties.py libs/engine/tests/test_engine_decode_logits.py \
    libs/engine/tests/test_engine_forks.py libs/engine/tests/test_engine_prompt_logprobs.py
part engine 120 python3 benchmarks/gpu/engine.py --model $model --json "$out/engine.json"
part engine-unchained 120 python3 benchmarks/gpu/engine.py --model $model --unchained --json "$out/engine-unchained.json"
part engine-deterministic 120 python3 benchmarks/gpu/engine.py --model $model --deterministic --json "$out/engine-deterministic.json"
part chunks 60 python3 benchmarks/gpu/chunks.py --model $model
part greedy 200 python3 benchmarks/gpu/greedy.py --model "${BATON_TEST_MODEL:-$HOME/.cache/baton/models/smollm2}"
part handoff 180 python3 benchmarks/gpu/handoff.py --model $model --json "$out/handoff.json"
part decode-host 150 python3 benchmarks/gpu/decode_host.py --model $model --json "$out/decode-host.json"
part kernels 120 python3 benchmarks/gpu/kernels.py
part transfer 120 python3 -m baton.kvtransfer.bench.gpu --repeats 3
part peers 480 python3 benchmarks/gpu/peers.py --model $model ${vllm:+--vllm-path "$vllm"} --json "$out/peers.json"
part beside 60 python3 benchmarks/gpu/beside.py "$out"
exit $failed
