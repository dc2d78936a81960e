#!/usr/bin/env bash
# Everything that two GPUs of one host have to say, correctness first: each figure beside its floor, its peer and its target.
#   benchmarks/gpu/two_gpus.sh OUT [PART...]
# Parts: kernels-correct engine-correct transfer transfer-back transfer-digest handoff landing unequal-ranks tensor-parallel injections decide. All of them without any named.
# Needs what all.sh needs. The last two take about two minutes each, the others less than eight together. Exits with the number of parts that failed or missed a target.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
wanted=$*
cd "$(dirname "$0")/../.."
model=benchmarks/gpu/qwen3-8b
. benchmarks/gpu/parts.sh
part kernels-correct 120 env CUDA_VISIBLE_DEVICES=1 BATON_KERNELS_DEVICE=cuda "${pytest[@]}" libs/kernels
part engine-correct 240 env BATON_ENGINE_DEVICE=cuda:1 "${pytest[@]}" libs/engine/tests/test_engine_device.py libs/engine/tests/test_engine_chunk_graphs.py \
    libs/engine/tests/test_engine_page_hash.py libs/engine/tests/test_engine_penalties.py libs/engine/tests/test_engine_decode_logits.py \
    libs/engine/tests/test_engine_forks.py libs/engine/tests/test_engine_prompt_logprobs.py
part transfer 120 python3 -m baton.kvtransfer.bench.gpu --sender-device 0 --receiver-device 1 --repeats 5
part transfer-back 60 python3 -m baton.kvtransfer.bench.gpu --sender-device 1 --receiver-device 0 --repeats 3 --nixl-threads
part transfer-digest 90 python3 benchmarks/gpu/transfer_digest.py --sender-device 0 --receiver-device 1 --json "$out/transfer-digest.json"
part handoff 120 python3 benchmarks/gpu/handoff.py --model $model --device cuda:0 --decode-device cuda:1 --digest all --json "$out/handoff.json"
part landing 90 python3 benchmarks/gpu/landing.py --model $model --digest all --json "$out/landing.json"
part unequal-ranks 120 env DECODE_TEST_DEVICE=cuda:0 "${pytest[@]}" -o asyncio_mode=auto services/decode/tests/test_decode_tensor_parallel.py \
    -k "the_split_equals_one_server and (2-1-shm or 2-2-shm)"
part tensor-parallel 120 python3 benchmarks/gpu/tensor_parallel.py --model $model --json "$out/tensor-parallel.json"
served=$(python3 benchmarks/gpu/geometry.py $model "$(mktemp -d)")
part injections 300 python3 benchmarks/injections.py --model "$served" --devices cuda:0,cuda:1 --rates 1,2 --chunk 512 --streams 16 --answers 1 \
    --answer-tokens 1024 --chat-words 256 --document-words 8192 --repeats 2 --worker-flag=--load-format=dummy --worker-flag=--dtype=bfloat16 \
    --out "$out/injections"
part decide 400 python3 -m baton.cli.main decide --quick --model "$served" --devices cuda:0,cuda:1 --worker-flag=--load-format=dummy \
    --worker-flag=--dtype=bfloat16 --prompt-words 300 --document-words 8192 --document-share 0.1 --answer-tokens 200 --cell-s 8 --budget-s 120 \
    --out "$out/decide"
exit $failed
