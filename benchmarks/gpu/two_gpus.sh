#!/usr/bin/env bash
# Everything that two GPUs of one host have to say, correctness first: each figure beside its floor, its peer and its target.
#   benchmarks/gpu/two_gpus.sh OUT [PART...]
# Parts: kernels-correct engine-correct transfer transfer-back handoff landing tensor-parallel decide. All of them without any named. Needs what
# all.sh needs. At most ten minutes for all. Exits with the number of parts that failed or missed a target.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
wanted=$*
cd "$(dirname "$0")/../.."
model=benchmarks/gpu/qwen3-8b
. benchmarks/gpu/parts.sh
part kernels-correct 120 env BATON_KERNELS_DEVICE=cuda:1 "${pytest[@]}" libs/kernels
part engine-correct 120 env BATON_ENGINE_DEVICE=cuda:1 "${pytest[@]}" libs/engine/tests/test_engine_device.py
part transfer 120 python3 -m baton.kvtransfer.bench.gpu --sender-device 0 --receiver-device 1 --repeats 5
part transfer-back 60 python3 -m baton.kvtransfer.bench.gpu --sender-device 1 --receiver-device 0 --repeats 3 --nixl-threads
part handoff 120 python3 benchmarks/gpu/handoff.py --model $model --device cuda:0 --decode-device cuda:1 --digest all --json "$out/handoff.json"
part landing 90 python3 benchmarks/gpu/landing.py --model $model --digest all --json "$out/landing.json"
part tensor-parallel 120 python3 benchmarks/gpu/tensor_parallel.py --model $model --json "$out/tensor-parallel.json"
part decide 300 python3 -m baton.cli.main decide --quick --model $model --devices cuda:0,cuda:1 --worker-flag=--load-format=dummy \
    --worker-flag=--dtype=bfloat16 --out "$out/decide"
exit $failed
