#!/usr/bin/env bash
# Refine the image model, train the motion module from it and evaluate both, on one GPU. Run again to resume.
#
#   training/release.sh run            all steps, one after the other; progress in $RELEASE/progress.log
#   training/release.sh wait SECONDS   print the progress until it ends or the time is over; starts `run` if needed
#   training/release.sh collect DIR    pack the results so far into at most 7 files of at most 14 MB
#
# Environment: RELEASE (folder, default runs/release), PYTHON, DEVICE, DATA, REFINE_MINUTES, DECODER_MINUTES,
# MOTION_MINUTES, WORKERS (judging processes), THINGS, VIDEOS and SEEDS (size of the evaluations), and for tests
# REFINE_OPTIONS, MOTION_OPTIONS and JUDGE_OPTIONS.
set -u
RELEASE=${RELEASE:-runs/release} PYTHON=${PYTHON:-python3} DEVICE=${DEVICE:-cuda} DATA=${DATA:-runs/data}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$RELEASE"

log() { echo "$(date -u +%H:%M:%S) $*" >> "$RELEASE/progress.log"; }

step() { # step NAME COMMAND...: run a command unless it has succeeded before
    local name=$1 status
    shift
    [ -e "$RELEASE/$name.done" ] && return 0
    log "$name: starts"
    "$@" >> "$RELEASE/$name.log" 2>&1
    status=$?
    if [ $status -eq 0 ]; then
        touch "$RELEASE/$name.done" && log "$name: done"
    else
        log "$name: FAILED with status $status: $(tail -n 3 "$RELEASE/$name.log" | tr '\n' ' ')"
    fi
    return $status
}

judge() { # judge NAME [OPTIONS]: evaluate an image model; one thread per judging process
    local name=$1
    shift
    step "evaluate_$name" env OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 nice "$PYTHON" -m training evaluate "$@" \
        --device "$DEVICE" --data "$DATA" --things "${THINGS:-300}" --workers "${WORKERS:-4}" \
        --json "$RELEASE/image_$name.json" --sheet "$RELEASE/sheet_$name.png"
}

run() {
    exec 9> "$RELEASE/lock"
    flock -n 9 || return 0
    # shellcheck disable=SC2086 # options are several words
    step refine "$PYTHON" -m training refine --device "$DEVICE" --data "$DATA" --out "$RELEASE/image" \
        --minutes "${REFINE_MINUTES:-7}" --decoder-minutes "${DECODER_MINUTES:-5}" ${REFINE_OPTIONS:-} || return 1
    (judge refined --model "$RELEASE/image/model"; judge before) &
    step motion "$PYTHON" -m training motion --device "$DEVICE" --data "$DATA" --out "$RELEASE/motion" \
        --image-model "$RELEASE/image/model" --minutes "${MOTION_MINUTES:-14}" ${MOTION_OPTIONS:-} || return 1
    mkdir -p "$RELEASE/videos"
    step evaluate_motion env OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 "$PYTHON" -m training motion-evaluate \
        --device "$DEVICE" --model "$RELEASE/motion/motion" --image-model "$RELEASE/image/model" \
        --videos "${VIDEOS:-10}" --seeds "${SEEDS:-3}" --workers "${MOTION_WORKERS:-12}" --save "$RELEASE/videos" \
        --json "$RELEASE/motion.json" ${JUDGE_OPTIONS:-}
    wait
    touch "$RELEASE/all.done"
    log "all steps ended"
}

wait_for() {
    local end=$((SECONDS + $1)) shown=0
    rm -f "$RELEASE/all.done"
    setsid bash "$0" run > /dev/null 2>> "$RELEASE/progress.log" < /dev/null 9>&- &
    while [ $SECONDS -lt "$end" ] && [ ! -e "$RELEASE/all.done" ]; do
        sleep 5
        tail -n +$((shown + 1)) "$RELEASE/progress.log" 2> /dev/null
        shown=$(wc -l < "$RELEASE/progress.log" 2> /dev/null || echo 0)
        flock -n "$RELEASE/lock" true && break # held as long as `run` works
    done
    tail -n 2 "$RELEASE"/*.log "$RELEASE"/*/log.jsonl 2> /dev/null
    return 0
}

export_motion() { # write the motion module from the last checkpoint, on the CPU, while it trains
    local folder=$RELEASE/motion_so_far
    [ -e "$RELEASE/motion/motion.pt" ] || return 0
    mkdir -p "$folder" && cp "$RELEASE/motion/motion.pt" "$folder/"
    CUDA_VISIBLE_DEVICES="" timeout 75 "$PYTHON" -m training motion --device cpu --data "$DATA" --out "$folder" --batch 1 \
        --workers 0 --image-model "$RELEASE/image/model" --minutes "${MOTION_MINUTES:-14}" \
        --stop-after-minutes 0.0001 >> "$RELEASE/export_motion.log" 2>&1
    rm -f "$folder/motion.pt"
}

collect() {
    local target=$1 motion=$RELEASE/motion/motion
    if [ -e "$RELEASE/refine.done" ]; then
        tar -C "$RELEASE/image" -cf - model | split -b 14M - "$target/image.tar."
    fi
    if [ ! -e "$RELEASE/motion.done" ]; then
        export_motion
        motion=$RELEASE/motion_so_far/motion
    fi
    [ -d "$motion" ] && tar -C "$motion" -cf "$target/motion.tar" .
    (cd "$RELEASE" && find . -maxdepth 2 \( -name '*.log' -o -name '*.json*' -o -name '*.png' -o -name '*.done' \
        -o -name '*.gif' \) -not -path './image/model/*' | tar -czf - -T -) | head -c 14M > "$target/reports.tar.gz"
    ls -l "$target"
}

case ${1:-} in
    run) run ;;
    wait) wait_for "$2" ;;
    collect) collect "$2" ;;
    *) sed -n '2,11p' "$0"; exit 2 ;;
esac
