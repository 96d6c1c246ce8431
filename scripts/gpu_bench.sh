#!/usr/bin/env bash
# Every way to decode, on one GPU, in one call of less than nine minutes.
#
#   scripts/gpu_bench.sh                   the demo's target and heads grown to 7B, bf16
#   SHAPE=1b OUT=runs/1b scripts/gpu_bench.sh
#   SHAPE=0.1b DEVICE=cpu PATIENCE=4 BATCH_SIZES="1 2" COMPILE=0 scripts/gpu_bench.sh
#
# Needs this repository, torch, transformers and peft, and pytest for its tests; nothing is installed
# or downloaded. The parts are processes of their own, each with its own time limit, and none runs
# longer than the whole may. What was measured is written as it comes: $OUT/PART/report.json and
# report.md, what a part printed to $OUT/PART.log, and how the parts ended to $OUT/parts.txt. The exit
# code is 1 where one failed or was cut off.
set -u
cd "$(dirname "$0")/.." || exit 1

SHAPE=${SHAPE:-7b}                    # own, 0.1b, 1b or 7b
HEADS=${HEADS:-assets/demo-heads}     # a checkpoint that names a small Llama
DEVICE=${DEVICE:-cuda}
BATCH_SIZES=${BATCH_SIZES:-1 32 8}   # the last may be cut off
NUM_PROMPTS=${NUM_PROMPTS:-8}         # for each batch size, and two batches at least
NEW_TOKENS=${NEW_TOKENS:-64}
COMPILE=${COMPILE:-1}                 # 0: leave out what torch.compile makes faster
PATIENCE=${PATIENCE:-1}               # every time limit times this, where there is no GPU
LIMIT=${LIMIT:-$((510 * PATIENCE))}    # seconds for everything
OUT=${OUT:-runs/gpu_bench}
PYTHON=${PYTHON:-python3}

export HF_HUB_OFFLINE=1
mkdir -p "$OUT" || exit 1
# Measured step times and compiled kernels are of this run alone.
OUT=$(cd "$OUT" && pwd)
export MEDUSA_HEADS_CACHE=$OUT/cache TORCHINDUCTOR_CACHE_DIR=$OUT/inductor

# part NAME SECONDS COMMAND..: run it for so long at most.
part() {
    local name=$1 limit=$(($2 * PATIENCE)) started=$SECONDS code ended
    shift 2
    if ((LIMIT - SECONDS < limit)); then limit=$((LIMIT - SECONDS)); fi
    if ((limit < 10)); then
        code=124
    else
        timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.log" 2>&1
        code=$?
        cat "$OUT/$name.log"  # whole, whatever runs beside
    fi
    case $code in
        0) ended=done ;;
        124 | 137) ended="cut off" ;;
        *) ended="failed ($code)" ;;
    esac
    echo "$name: $ended after $((SECONDS - started)) seconds" | tee -a "$OUT/parts.txt"
}

# measure NAME SECONDS FLAGS..: a table of its own.
measure() {
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$PYTHON" -m scripts.grown.benchmark --heads "$HEADS" --device "$DEVICE" \
        --num_prompts "$NUM_PROMPTS" --max_new_tokens "$NEW_TOKENS" --report "$OUT/$name" "$@"
}

: >"$OUT/parts.txt"
if command -v nvidia-smi >/dev/null; then nvidia-smi >"$OUT/nvidia-smi.txt"; fi

methods=(heads:static:15 heads:auto) kernels=()
if [[ $COMPILE == 1 ]]; then
    methods=(plain-compiled "${methods[@]}")
    [[ $DEVICE != cuda* ]] || kernels=(heads:static:15+kernels heads:auto+kernels)
fi
ours=(heads:auto heads:static:15 suffix recycling auto)
stream=("${ours[@]/%/+stream}" heads:dynamic:16+stream lookahead+stream)
own=(--shape own --dtype float32 --must_be_identical)

# First what no clock says, side by side. In fp32 rounding tips no choice: every text must be plain
# decoding's own. Steps are recorded where that can be done; those that draw from transformers' own
# stream ask the host.
if [[ $DEVICE == cuda* ]] && "$PYTHON" -c "import pytest" 2>/dev/null; then
    recorded=(tests/machine/test_recording.py tests/{target/graphs,inference/models}/test_captured.py)
    kernels_of=(tests/{trees/test_kernels,target/test_stacks,target/graphs/test_joined}.py)
    kernels_of+=(tests/machine/test_split_attention.py tests/inference/engine/test_device_loop.py)
    "$PYTHON" -c "import xdist" 2>/dev/null && processes=(-n 8) || processes=()
    part tests 120 env MEDUSA_HEADS_TEST_DEVICE="$DEVICE" "$PYTHON" -m pytest "${processes[@]}" \
        "${recorded[@]}" "${kernels_of[@]}" &
fi
measure lossless 120 "${own[@]}" --decodings greedy sampled --methods "${stream[@]}" &
measure lossless-batch 120 "${own[@]}" --batch_sizes 8 \
    --methods "${ours[@]}" heads:dynamic:16 lookahead &
[[ $COMPILE == 0 ]] || measure lossless-compiled 120 "${own[@]}" \
    --methods heads:static:15+compile heads:static:15+steps "${kernels[@]}" &
wait

# Compiled plain decoding of a 7B target takes half a minute to make, and so do the kernels of all
# sizes of tree that auto chooses from.
for size in $BATCH_SIZES; do
    others=()
    [[ $size != 1 ]] || others=(suffix auto)
    measure "usual-$size" 120 --shape "$SHAPE" --batch_sizes "$size" \
        --methods "${methods[@]}" "${kernels[@]}" "${others[@]}"
    # How much of a step is the target's forward.
    [[ $DEVICE != cuda* ]] || part "shares-$size" 80 "$PYTHON" -m scripts.grown.shares \
        --heads "$HEADS" --shape "$SHAPE" --device "$DEVICE" --batch_sizes "$size" \
        --new_tokens "$NEW_TOKENS" --output "$OUT/shares-$size/shares.json"
done
measure sampled 90 --shape "$SHAPE" --decodings sampled --methods "${methods[@]}" \
    ${kernels[@]+heads:static:15+kernels}
[[ $DEVICE != cuda* ]] || part attention 40 "$PYTHON" -m scripts.measure.attention
LIMIT=$((LIMIT + 20))  # whatever was cut off
[[ $COMPILE == 0 ]] || part goals 20 "$PYTHON" -m scripts.measure.goals --folder "$OUT"

echo "Everything is in $OUT, after $SECONDS seconds:"
cat "$OUT/parts.txt"
! grep -qv ": done after" "$OUT/parts.txt"
