# Fetch a model into $MODEL_TARGET once, however many pods share the volume: sh fetch.sh COMMAND [ARG ...]
#
# COMMAND writes the model into $MODEL_DIR, a folder that only this pod writes to, on the same volume. A rename then
# makes it $MODEL_TARGET, so that a reader sees a complete model or none. The first rename wins, and a complete model is
# never written to again. The lock only avoids that pods download the same files at the same time: if it fails, each of
# them downloads, and the result is the same. A restarted container continues in its $MODEL_DIR.
set -eu
lock=$MODEL_TARGET.lock
mkdir -p "${MODEL_TARGET%/*}" "$MODEL_DIR"
waits=
# The holder touches its lock every 20 s. After two minutes without a touch its pod is dead.
until [ -d "$MODEL_TARGET" ] || mkdir "$lock" 2>/dev/null; do
    if [ -n "$(find "$lock" -maxdepth 0 -mmin +2 2>/dev/null)" ]; then
        echo "the lock $lock is stale"
        rmdir "$lock" 2>/dev/null || :
    else
        [ -n "$waits" ] || echo "another pod fetches $MODEL_TARGET"
        waits=yes
        sleep 5
    fi
done
if [ -d "$MODEL_TARGET" ]; then
    rm -rf "$MODEL_DIR"
    echo "$MODEL_TARGET is complete"
    exit 0
fi

while sleep 20; do touch -c "$lock"; done >/dev/null 2>&1 &
heartbeat=$!
job=
trap 'kill $heartbeat $job 2>/dev/null || :; rmdir "$lock" 2>/dev/null || :' EXIT
trap 'exit 143' TERM INT
# Remove what pods left that died during a download and did not come back.
for old in "${MODEL_DIR%/*}"/.fetch-*; do
    if [ "$old" != "$MODEL_DIR" ] && [ -d "$old" ] && [ -z "$(find "$old" -mmin -120 2>/dev/null | head -n 1)" ]; then
        rm -rf "$old"
    fi
done

mkdir -p "$MODEL_DIR"
"$@" &
job=$!
wait $job
job=
if [ ! -f "$MODEL_DIR/config.json" ]; then
    echo "no config.json in $MODEL_DIR after: $*" >&2
    exit 1
fi
rm -rf "$MODEL_DIR/.cache"
sync -f "$MODEL_DIR" 2>/dev/null || sync
# mv -T fails if the target exists: then another pod was faster.
if mv -T "$MODEL_DIR" "$MODEL_TARGET" 2>/dev/null; then
    echo "$MODEL_TARGET is complete"
elif [ -d "$MODEL_TARGET" ]; then
    rm -rf "$MODEL_DIR"
    echo "$MODEL_TARGET was completed by another pod"
else
    echo "cannot rename $MODEL_DIR to $MODEL_TARGET" >&2
    exit 1
fi
